"""Shamir's secret sharing of 32 bytes over a prime field (Shamir 1979).

Flower's, by pycryptodome, is sound and splits into 16 bytes of GF(2¹²⁸) in Python: one secret of 67
shares, any 34 of which restore it, takes it 0.1 s to share and 0.3 s to restore, which the server
does for each of 100 units in every round. Python's own whole numbers need a hundredth of that.
"""

import functools
import hashlib
import secrets
from collections.abc import Collection, Mapping

from collapipe.errors import WireError

PRIME = 2**256 + 297  # the least above all secrets
SECRET_BYTES, SHARE_BYTES, DIGEST_BYTES = 32, 33, 16


def split(secret: bytes, threshold: int, places: Collection[int]) -> dict[int, bytes]:
    """A share for each of the ``places``, which are above 0: any ``threshold`` of them restore the
    secret of 32 bytes, and fewer say nothing of it."""
    coefficients = [int.from_bytes(secret), *(_drawn() for _ in range(threshold - 1))]
    return {place: _at(coefficients, place).to_bytes(SHARE_BYTES) for place in places}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of as many shares as its threshold. Raises ``WireError`` where they have none."""
    weights = _weights(tuple(shares))
    numbers = map(int.from_bytes, shares.values())
    secret = sum(weight * share for weight, share in zip(weights, numbers, strict=True)) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise WireError("shares that belong to no secret")
    return secret.to_bytes(SECRET_BYTES)


def digest(share: bytes) -> bytes:
    """Lets somebody who has no share recognise it."""
    return hashlib.sha256(b"collapipe share " + share).digest()[:DIGEST_BYTES]


@functools.lru_cache(maxsize=4)  # a round's secrets are restored at the same places
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's, by which the polynomial's values at ``places`` sum up to its value at 0."""
    weights = list[int]()
    for place in places:
        numerator = denominator = 1
        for other in places:
            if other != place:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - place) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)


def _drawn() -> int:
    return secrets.randbelow(PRIME)


def _at(coefficients: list[int], place: int) -> int:
    """The polynomial's value, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value
