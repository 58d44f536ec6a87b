"""A member's copy of the authority's list of revoked certificates: a CRL in PEM."""

import logging
from pathlib import Path

from cryptography import x509

from collapipe.credentials import files
from collapipe.credentials.keys import public_key, reading
from collapipe.errors import ConfigError

_log = logging.getLogger(__name__)
_WAY_OUT = "put revoked.crl of the authority in its place"


class Revocations:
    """Serials of revoked certificates; the file is read again whenever it has changed.

    If a changed file is unreadable, older or from another authority, a warning is logged and the
    present list stays in use. Raises ``ConfigError`` if the first list is invalid.
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
    """Return the list in a PEM file. Raises ``ConfigError`` if ``authority`` did not sign it."""
    return parse_list(files.read(file, _WAY_OUT), authority, file)


def newer_list(
    file: Path, present: x509.CertificateRevocationList, authority: x509.Certificate
) -> x509.CertificateRevocationList:
    """Return the list in ``file``. Raises ``ConfigError`` if it is older than ``present``."""
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
    """Return the list in the PEM text of ``file``. Raises ``ConfigError`` as ``read_list`` does."""
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
    """Return the list's number; the authority's first list has number 1."""
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _version(file: Path) -> tuple[int, ...]:
    """Return values that differ after a change of the file; empty if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
