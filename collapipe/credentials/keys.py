"""Private keys and certificate requests, which a member makes on its own machine."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from collapipe.credentials.member import check_name
from collapipe.errors import ConfigError

PEM = serialization.Encoding.PEM
UNREADABLE = (  # errors that cryptography raises for bad bytes
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a certificate: the wanted name, and the member's public key."""

    name: str
    public_key: ec.EllipticCurvePublicKey


def make_key() -> ec.EllipticCurvePrivateKey:
    """Make a new key on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the key as PEM without a password: anyone who can read the file has the key."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def openssh(key: bytes) -> bytes:
    """Convert a PEM key to the OpenSSH form that Flower reads."""
    form = serialization.PrivateFormat.OpenSSH
    own = serialization.load_pem_private_key(key, None)
    return own.private_bytes(PEM, form, serialization.NoEncryption())


def read_key(content: bytes, file: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key in a PEM file. Raises ``ConfigError`` if it has no readable P-256 key."""
    with reading(file, "holds no private key that can be read; make one"):
        key = serialization.load_pem_private_key(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_p256(key.public_key()):
        raise ConfigError(f"{file}: its key is not on the curve P-256; make a new one")
    return key


def request_pem(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Return a certificate request (PEM), which proves that its sender has the key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509_name(check_name(name)))
    return builder.sign(key, hashes.SHA256()).public_bytes(PEM)


def read_request(content: bytes, file: Path) -> Request:
    """Return a PEM request's name and key; extensions are ignored.

    Raises ``ConfigError`` if the request is invalid.
    """
    way_out = "bring the request.pem of: collapipe credentials request DIR --name NAME"
    with reading(file, f"is no request for a certificate; {way_out}"):
        request = x509.load_pem_x509_csr(content)
        (name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key, signed = request.public_key(), request.is_signature_valid
    if not signed or not is_p256(key):
        raise ConfigError(f"{file}: its signature or its kind of key is wrong; {way_out}")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return Request(check_name(str(name.value)), key)


def is_p256(key: object) -> bool:
    """Whether ``key`` is a public key on P-256, the only supported curve."""
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the first 128 bits of the key's SHA-256 as eight groups of hex digits."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    spki = key.public_bytes(serialization.Encoding.DER, form)
    return hashlib.sha256(spki).digest()[:16].hex(" ", 2)


def public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the public key of a member's or an authority's certificate."""
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def x509_name(text: str) -> x509.Name:
    """Return an X.509 name with ``text`` as common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@contextmanager
def reading(file: Path, fault: str) -> Iterator[None]:
    """Raise ``ConfigError`` with the ``fault`` of ``file`` if cryptography cannot read it."""
    try:
        yield
    except UNREADABLE as error:
        raise ConfigError(f"{file}: {fault}") from error
