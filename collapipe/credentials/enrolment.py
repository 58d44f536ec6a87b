"""A member's folder, on its own box: a key and a request, and later what the authority signed."""

from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials import files
from collapipe.credentials.bundle import (
    AUTHORITY,
    KEY,
    REQUEST,
    REVOKED,
    Bundle,
    read_bundle,
    read_certificate,
)
from collapipe.credentials.keys import PEM, Request, key_pem, make_key, read_key, request_pem
from collapipe.credentials.revocations import check_newer, number_of, parse_list, read_list
from collapipe.errors import ConfigError

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def request(folder: Path, name: str) -> Request:
    """Make a key in ``folder``, unless it holds one, and ``request.pem``, which asks for a
    certificate of that key.

    Raises ``ConfigError`` for a bad name, a bad key and a request of somebody else's.
    """
    if (folder / KEY).exists():
        key = _own_key(folder)
        content = request_pem(key, name)
    elif (folder / REQUEST).exists():
        raise ConfigError(f"{folder}: holds a request without its key; choose another folder")
    else:
        key = make_key()
        content = request_pem(key, name)
        files.make_folder(folder)
        files.write_new(folder / KEY, key_pem(key), files.PRIVATE)
    files.replace(folder / REQUEST, content)
    return Request(name, key.public_key())


def install(folder: Path, file: Path) -> Bundle | None:
    """Put into ``folder`` what the authority signed: a bundle, or a newer list of revoked
    certificates alone, for which it returns None.

    Raises ``ConfigError`` where it is for another key, another authority's, or an older list.
    """
    content = files.read(file, "bring the file that collapipe credentials sign has named")
    if _CERTIFICATE not in content:
        _install_list(folder, content, file)
        return None
    bundle = read_bundle(content, file)
    if bundle.certificate.public_key() != _own_key(folder).public_key():
        raise ConfigError(
            f"{file}: is {bundle.member}'s, for another key than the one in {folder}; bring what "
            f"was signed for {folder / REQUEST}"
        )
    if (folder / AUTHORITY).exists() and _authority(folder) != bundle.authority:
        raise ConfigError(f"{file}: {folder} is of another authority; choose another folder")
    if (folder / REVOKED).exists():
        present = read_list(folder / REVOKED, bundle.authority)
        bundle = replace(bundle, revoked=max(present, bundle.revoked, key=number_of))
    bundle.write(folder)
    return bundle


def _install_list(folder: Path, content: bytes, file: Path) -> None:
    authority = _authority(folder)
    offered = parse_list(content, authority, file)
    if (folder / REVOKED).exists():
        check_newer(offered, read_list(folder / REVOKED, authority), file)
    files.replace(folder / REVOKED, offered.public_bytes(PEM))


def _authority(folder: Path) -> x509.Certificate:
    """Whom the folder trusts already."""
    return read_certificate(folder / AUTHORITY, "install a certificate there first")


def _own_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    file, way_out = folder / KEY, f"first: collapipe credentials request {folder} --name NAME"
    return read_key(files.read(file, way_out, private=True), file)
