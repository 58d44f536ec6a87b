"""What units and server say to one another for a masked sum, with bounds on all of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import Base64UrlBytes, Field

from collapipe.secure_aggregation.masks import KEY_BYTES, TAG_BYTES
from collapipe.secure_aggregation.shamir import SHARE_BYTES

T = TypeVar("T")
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
Unit = Annotated[int, Field(ge=0, lt=2**31)]
Round = Annotated[int, Field(ge=1, lt=2**63)]
Key = Annotated[Base64UrlBytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Share = Annotated[Base64UrlBytes, Field(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Sealed = Annotated[Base64UrlBytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]
BothShares = Annotated[
    Base64UrlBytes, Field(min_length=2 * SHARE_BYTES, max_length=2 * SHARE_BYTES)
]
_MOST = Field(max_length=10_000)  # units
ByUnit = Annotated[Mapping[Unit, T], _MOST]


@dataclass(frozen=True, slots=True)
class KeysRequest:
    """Asks a unit for the public keys of a round."""

    round: Round


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Of the pair that masks are agreed by, and of the one that shares are sealed by."""

    mask: Key
    seal: Key


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature of a unit's public keys, and the public key of the credentials that it is by."""

    key: Annotated[Base64UrlBytes, Field(max_length=200)]
    signature: Annotated[Base64UrlBytes, Field(max_length=100)]


@dataclass(frozen=True, slots=True)
class KeysReply:
    """``signed`` by a unit that has credentials."""

    unit: Unit
    keys: PublicKeys
    signed: Signed | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """The public keys of all units of a round that told some, for each of them, and what shows
    whose they are."""

    round: Round
    keys: ByUnit[PublicKeys]
    signed: ByUnit[Signed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharesReply:
    """A unit's shares, sealed for each neighbour: of its mask key, then of its self mask's seed."""

    unit: Unit
    sealed: ByUnit[Sealed]


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Goes with the ``train`` message: the shares that a unit's neighbours sealed for it."""

    sealed: ByUnit[Sealed]


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """Whose masked updates came."""

    round: Round
    survivors: Annotated[tuple[Unit, ...], _MOST]


@dataclass(frozen=True, slots=True)
class UnmaskReply:
    """A unit's share of each neighbour's secret, and of its own: the self mask's seed of those
    whose update came, the mask key of the others."""

    unit: Unit
    shares: ByUnit[Share]
