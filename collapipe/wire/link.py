"""Definitions for both ends of the decoder link: its gRPC method, tokens and certificates.

Certificates are made for one run, sent through Flower and never stored. A deployed server uses its
own certificate instead.
"""

from collections.abc import Mapping
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from collapipe.credentials import signing
from collapipe.credentials.keys import PEM, key_pem, make_key

METHOD = "/collapipe.DecoderLink/Train"
# Names in the certificates, independent of addresses.
SERVER_NAME, UNIT_NAME = "decoder.collapipe", "unit.collapipe"
_AUTHORIZATION, _UNIT = "authorization", "collapipe-unit"
VALID = timedelta(days=30)


def credentials(unit: int, token: str) -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata with the caller's unit number and its bearer token for the round."""
    return ((_AUTHORIZATION, f"Bearer {token}"), (_UNIT, str(unit)))


def read_credentials(metadata: Mapping[str, str]) -> tuple[str, str]:
    """Return unit and token of a call; each is empty if the call lacks it."""
    return metadata.get(_UNIT, ""), metadata.get(_AUTHORIZATION, "").removeprefix("Bearer ")


def self_signed(subject: str = SERVER_NAME) -> tuple[bytes, bytes]:
    """Return a new private key and self-signed certificate for ``subject``, both PEM."""
    key = make_key()
    names = x509.SubjectAlternativeName([x509.DNSName(subject)])
    builder = signing.self_signed(key, subject, VALID).add_extension(names, critical=False)
    return key_pem(key), builder.sign(key, hashes.SHA256()).public_bytes(PEM)
