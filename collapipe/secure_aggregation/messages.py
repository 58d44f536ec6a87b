"""Messages between units and server for a masked sum, with bounds on every field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import Base64UrlBytes, Field

from collapipe.secure_aggregation.masks import KEY_BYTES, TAG_BYTES
from collapipe.secure_aggregation.shamir import DIGEST_BYTES, SHARE_BYTES

T = TypeVar("T")
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
Unit = Annotated[int, Field(ge=0, lt=2**31)]
Run = Annotated[int, Field(ge=0, lt=2**64)]
Round = Annotated[int, Field(ge=1, lt=2**63)]
Key = Annotated[Base64UrlBytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Share = Annotated[Base64UrlBytes, Field(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Sealed = Annotated[Base64UrlBytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]
BothShares = Annotated[
    Base64UrlBytes, Field(min_length=2 * SHARE_BYTES, max_length=2 * SHARE_BYTES)
]
Tag = Annotated[Base64UrlBytes, Field(min_length=TAG_BYTES, max_length=TAG_BYTES)]
BothDigests = Annotated[
    Base64UrlBytes, Field(min_length=2 * DIGEST_BYTES, max_length=2 * DIGEST_BYTES)
]
_MOST = Field(max_length=10_000)  # units
ByUnit = Annotated[Mapping[Unit, T], _MOST]


@dataclass(frozen=True, slots=True)
class KeysRequest:
    """Asks a unit for the public keys of a round."""

    round: Round


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """A unit's public keys: ``mask`` for agreeing on masks, ``seal`` for sealing shares."""

    mask: Key
    seal: Key


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature of a unit's public keys, and the public ``key`` of the signing credentials."""

    key: Annotated[Base64UrlBytes, Field(max_length=200)]
    signature: Annotated[Base64UrlBytes, Field(max_length=100)]


@dataclass(frozen=True, slots=True)
class KeysReply:
    """A unit's public keys, ``signed`` if the unit has credentials."""

    unit: Unit
    keys: PublicKeys
    signed: Signed | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """The public keys of all participating units of a round, and the signatures of these keys."""

    run: Run
    round: Round
    keys: ByUnit[PublicKeys]
    signed: ByUnit[Signed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharesReply:
    """A unit's shares, sealed for each other unit: of its mask key, then of its self mask's seed.

    ``digests`` of all shares, including the unit's own, let the server check revealed shares. A
    share is as hard to guess as the secret, so a digest reveals nothing about it. A unit that
    ``refused`` the keys of others shares nothing.
    """

    unit: Unit
    sealed: ByUnit[Sealed]
    digests: ByUnit[BothDigests]
    refused: Annotated[tuple[Unit, ...], _MOST] = ()


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Goes with the ``train`` message: the shares that the other units sealed for this one."""

    sealed: ByUnit[Sealed]


@dataclass(frozen=True, slots=True)
class SurvivorsRequest:
    """Names the units whose masked updates arrived."""

    round: Round
    survivors: Annotated[tuple[Unit, ...], _MOST]


@dataclass(frozen=True, slots=True)
class SurvivorsReply:
    """Confirms to each other survivor which survivors this unit was sent."""

    unit: Unit
    confirmations: ByUnit[Tag]


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """Asks a unit for its shares: the other survivors' confirmations for it."""

    round: Round
    confirmations: ByUnit[Tag]


@dataclass(frozen=True, slots=True)
class UnmaskReply:
    """A unit's share of one secret of each unit, itself included.

    The secret is the self mask's seed for a survivor, and the mask key for any other unit.
    """

    unit: Unit
    shares: ByUnit[Share]
