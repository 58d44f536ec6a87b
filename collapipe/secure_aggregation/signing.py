"""Public keys that tell whose they are: signed with the key of a unit's credentials (ECDSA, P-256).

Without it a unit takes the server's word for whose keys a roster has. An owner who knows the
fingerprints of its peers' credentials, from their owners, need not.
"""

from collections.abc import Collection

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.keys import UNREADABLE, fingerprint, is_p256
from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import PublicKeys, Roster, Signed

_HOW = ec.ECDSA(hashes.SHA256())
_FORM = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


def sign(
    key: ec.EllipticCurvePrivateKey, run: int, round_: int, unit: int, keys: PublicKeys
) -> Signed:
    """Show that ``unit``, whose credentials have this ``key``, made ``keys`` in this round."""
    signature = key.sign(_text(run, round_, unit, keys), _HOW)
    return Signed(key.public_key().public_bytes(*_FORM), signature)


def check_signed(roster: Roster, own: int, peers: Collection[str]) -> None:
    """Raise ``WireError`` unless each unit of the roster beside the ``own`` one has keys that one
    of the ``peers`` has signed, by their fingerprints, and another one for each."""
    left = {*peers}
    for unit in roster.keys.keys() - {own}:
        signer = _signer(roster, unit)
        if signer not in left:
            raise WireError(
                f"the keys of unit {unit} are signed by {signer or 'nobody'}: none of "
                "privacy.peers in the owner's file, or one that has signed another unit's"
            )
        left.remove(signer)


def _signer(roster: Roster, unit: int) -> str | None:
    """The fingerprint of who has signed a unit's keys; None: nobody has."""
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
