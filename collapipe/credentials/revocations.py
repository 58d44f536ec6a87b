"""The authority's list of revoked certificates, as a member keeps it: a CRL in PEM."""

import logging
from pathlib import Path

from cryptography import x509

from collapipe.credentials import files
from collapipe.credentials.keys import public_key, reading
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

    def __contains__(self, serial: int) -> bool:
        seen = _version(self._file)
        if seen != self._seen:
            self._seen = seen
            try:
                self._list = newer_list(self._file, self._list, self._authority)
            except ConfigError as error:
                _log.warning("%s; the list that was read before holds", error)
        return is_revoked(serial, self._list)


def is_revoked(serial: int, present: x509.CertificateRevocationList) -> bool:
    """Whether the list names the certificate with this serial."""
    return present.get_revoked_certificate_by_serial_number(serial) is not None


def read_list(file: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """The list in a PEM file. Raises ``ConfigError`` where ``authority`` did not sign it."""
    return parse_list(files.read(file, _WAY_OUT), authority, file)


def newer_list(
    file: Path, present: x509.CertificateRevocationList, authority: x509.Certificate
) -> x509.CertificateRevocationList:
    """``read_list`` of a ``file`` that forgets nothing of the ``present`` list. Raises
    ``ConfigError`` where it is older."""
    offered = read_list(file, authority)
    if number_of(offered) < number_of(present):
        raise ConfigError(
            f"{file}: list {number_of(offered)} of revoked certificates is older than the "
            f"present one, {number_of(present)}; {_WAY_OUT}"
        )
    return offered


def parse_list(
    content: bytes, authority: x509.Certificate, file: Path
) -> x509.CertificateRevocationList:
    """The list in the PEM text of ``file``. Raises ``ConfigError`` as ``read_list`` does."""
    with reading(file, f"is no list of revoked certificates; {_WAY_OUT}"):
        found = x509.load_pem_x509_crl(content)
        number_of(found)
        signed = found.is_signature_valid(public_key(authority))
    if not signed:
        raise ConfigError(
            f"{file}: a list of revoked certificates that another authority signed; {_WAY_OUT}"
        )
    return found


def number_of(found: x509.CertificateRevocationList) -> int:
    """Which list it is: the authority's first one has number 1."""
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _version(file: Path) -> tuple[int, ...]:
    """What differs after a change of the file; empty where there is none."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
