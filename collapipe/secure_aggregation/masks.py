"""Key agreement between two units, sealed messages, and masks expanded from seeds.

The library ``cryptography`` provides X25519 and HKDF-SHA256 for keys, and ChaCha20-Poly1305 to seal
shares. ChaCha20 generates masks, because it is fast on boards without AES in hardware.

Flower's own functions are not used for two reasons. Its masks come from numpy's Mersenne Twister
with a 32-bit seed, which can be found by trial, and they never take the largest value. Its agreed
keys depend only on the pair of units, so one key would serve two purposes.
"""

import hmac
from collections.abc import Collection
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from collapipe.errors import WireError

Words = NDArray[np.unsignedinteger[Any]]
KEY_BYTES, TAG_BYTES = 32, 16
_ONCE = bytes(12)  # the nonce of a key that seals one message
_CHUNK = 2**20  # words of a mask at a time


def new_key() -> bytes:
    """Make a private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_usable(public: bytes) -> bool:
    """Whether a key is not of small order, so that secrets agreed with it are secret."""
    try:
        _agreed(new_key(), public, b"", "")
    except WireError:
        return False
    return True


def pair_seed(private: bytes, public: bytes, session: bytes, one: int, other: int) -> bytes:
    """Return the seed of the mask that two units share in a session, the same for both."""
    return _agreed(private, public, session, f"mask {min(one, other)} {max(one, other)}")


def add_mask(words: Words, seed: bytes, negative: bool = False) -> None:
    """Add a mask to ``words`` in place, modulo 2^bits of a word; ``negative`` subtracts it."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    for first in range(0, words.size, _CHUNK):
        part = words[first : first + _CHUNK]
        mask = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype.newbyteorder("<"))
        if negative:
            part -= mask
        else:
            part += mask


def confirming_key(private: bytes, public: bytes, session: bytes, one: int, other: int) -> bytes:
    """Return the key with which two units confirm survivors to each other, the same for both."""
    return _agreed(private, public, session, f"survivors {min(one, other)} {max(one, other)}")


def confirmation(key: bytes, sender: int, survivors: Collection[int]) -> bytes:
    """Return a tag that proves to the other key holder which survivors ``sender`` received."""
    return hmac.digest(key, f"{sender} {sorted(survivors)}".encode(), "sha256")[:TAG_BYTES]


def seal(
    secret: bytes, private: bytes, public: bytes, session: bytes, sender: int, to: int
) -> bytes:
    """Encrypt ``secret`` for one unit. The key fits one message of this sender in this session."""
    return _sealing(private, public, session, sender, to).encrypt(_ONCE, secret, None)


def unseal(
    sealed: bytes, private: bytes, public: bytes, session: bytes, sender: int, to: int
) -> bytes | None:
    """Decrypt a sealed secret. Returns None if it is for other units or of another session."""
    try:
        return _sealing(private, public, session, sender, to).decrypt(_ONCE, sealed, None)
    except (InvalidTag, WireError):
        return None


def _sealing(
    private: bytes, public: bytes, session: bytes, sender: int, to: int
) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_agreed(private, public, session, f"shares {sender} {to}"))


def _agreed(private: bytes, public: bytes, session: bytes, purpose: str) -> bytes:
    """Return the agreed key. Raises ``WireError`` for a public key of small order."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise WireError("a public key of small order") from error
    return HKDF(SHA256(), KEY_BYTES, salt=session, info=purpose.encode()).derive(shared)
