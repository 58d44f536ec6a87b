"""Sign a unit's public keys with the key of its credentials (ECDSA, P-256), and check signatures.

Without signatures a unit must trust the server about the owners of a roster's keys. With the
fingerprints of the peers' credentials (``privacy.peers``), a unit checks the owners itself.
"""

from collections.abc import Collection

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.keys import UNREADABLE, fingerprint, is_p256
from collapipe.secure_aggregation.messages import PublicKeys, Roster, Signed

_HOW = ec.ECDSA(hashes.SHA256())
_FORM = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


def sign(
    key: ec.EllipticCurvePrivateKey, run: int, round_: int, unit: int, keys: PublicKeys
) -> Signed:
    """Sign ``keys`` with the unit's credentials, to prove that ``unit`` made them in this round."""
    signature = key.sign(_text(run, round_, unit, keys), _HOW)
    return Signed(key.public_key().public_bytes(*_FORM), signature)


def strangers(roster: Roster, own: int, peers: Collection[str]) -> tuple[int, ...]:
    """Return the roster's units whose keys are not signed by a peer, or by a peer that has signed
    another unit's. ``own`` is the caller's unit; ``peers`` are fingerprints."""
    left, found = {*peers}, list[int]()
    for unit in sorted(roster.keys.keys() - {own}):
        signer = _signer(roster, unit)
        if signer in left:
            left.remove(signer)
        else:
            found.append(unit)
    return tuple(found)


def _signer(roster: Roster, unit: int) -> str | None:
    """Return the fingerprint of the key that signed a unit's keys; None if not validly signed."""
    if (signed := roster.signed.get(unit)) is None:
        return None
    try:
        key = serialization.load_der_public_key(signed.key)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not is_p256(key):
            return None
        text = _text(roster.run, roster.round, unit, roster.keys[unit])
        key.verify(signed.signature, text, _HOW)
    except UNREADABLE:
        return None
    return fingerprint(key)


def _text(run: int, round_: int, unit: int, keys: PublicKeys) -> bytes:
    name = b"collapipe keys of a masked sum "
    numbers = b"".join(each.to_bytes(8) for each in (run, round_, unit))
    return name + numbers + keys.mask + keys.seal
