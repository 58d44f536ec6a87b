"""The authority's list of revoked certificates, as a member keeps it: a CRL in PEM."""

import logging
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials import files
from collapipe.credentials.keys import UNREADABLE
from collapipe.errors import ConfigError

_log = logging.getLogger(__name__)
_WAY_OUT = "put revoked.crl of the authority in its place"


class Revocations:
    """Serials of revoked certificates, read again whenever the file has changed.

    A file that has become unreadable, another authority's or an older one changes nothing but the
    log: what was revoked stays so. Raises ``ConfigError`` where it is so from the beginning.
    """

    def __init__(self, file: Path, authority: x509.Certificate) -> None:
        self._file, self._authority = file, authority
        self._seen = _version(file)
        self._list = read_list(file, authority)
        self._serials = _serials(self._list)

    def __contains__(self, serial: int) -> bool:
        seen = _version(self._file)
        if seen != self._seen:
            self._seen = seen
            self._read_again()
        return serial in self._serials

    def _read_again(self) -> None:
        try:
            newer = read_list(self._file, self._authority)
            check_newer(newer, self._list, self._file)
        except ConfigError as error:
            _log.warning("%s; the list that was read before holds", error)
        else:
            self._list, self._serials = newer, _serials(newer)


def read_list(file: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """The list in a PEM file. Raises ``ConfigError`` where ``authority`` did not sign it."""
    return parse_list(files.read(file, _WAY_OUT), authority, file)


def parse_list(
    content: bytes, authority: x509.Certificate, file: Path
) -> x509.CertificateRevocationList:
    """The list in the PEM text of ``file``. Raises ``ConfigError`` as ``read_list`` does."""
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        found = x509.load_pem_x509_crl(content)
        number_of(found)
        signed = found.is_signature_valid(key)
    except (*UNREADABLE, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{file}: is no list of revoked certificates; {_WAY_OUT}") from error
    if not signed:
        raise ConfigError(
            f"{file}: a list of revoked certificates that another authority signed; {_WAY_OUT}"
        )
    return found


def check_newer(
    offered: x509.CertificateRevocationList, present: x509.CertificateRevocationList, file: Path
) -> None:
    """Raise ``ConfigError`` where ``offered`` is the older list and would forget revocations."""
    if number_of(offered) < number_of(present):
        raise ConfigError(
            f"{file}: list {number_of(offered)} of revoked certificates is older than the "
            f"present one, {number_of(present)}; {_WAY_OUT}"
        )


def number_of(found: x509.CertificateRevocationList) -> int:
    """Which list it is: the authority's first one has number 1."""
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _serials(found: x509.CertificateRevocationList) -> frozenset[int]:
    return frozenset(entry.serial_number for entry in found)


def _version(file: Path) -> tuple[int, ...]:
    """What differs after a change of the file; empty where there is none."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
