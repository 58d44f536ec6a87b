"""What server and units tell each other in a round, before it becomes Flower's records."""

from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport
from collapipe.state import ClusterState
from collapipe.tensors import Tensors


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """How a unit reaches the decoder for one round. Keys and token never appear in a log.

    Attributes
    ----------
    server_certificate
        The only one that the unit accepts, PEM.
    unit_key, unit_certificate
        What the server asks of every connection, PEM; the same for all units of a run.
    token
        Good for one unit, round and stream.
    """

    address: str
    server_certificate: bytes
    unit_key: bytes
    unit_certificate: bytes
    token: str

    def __repr__(self) -> str:
        return f"LinkAddress(address={self.address!r})"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a unit must know of a run before its first round.

    Attributes
    ----------
    tokenizer
        See ``Tokenizer.pack``.
    frozen
        Part of the model → digest of its weights that do not train, as ``FrozenStore`` has them.
    """

    tokenizer: str
    frozen: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The server's message to a scheduled unit, beside the weights that travel with it; ``link`` is
    None where the unit has the head."""

    round: int
    plan: ClusterPlan
    timeout_s: float
    link: LinkAddress | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a unit did not do what it was asked to: the error's name and its one line."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class StateReply:
    """What a unit tells of itself.

    Attributes
    ----------
    state
        Its cluster; or why what it says of it is none.
    lacking
        Frozen parts of the model that it has not.
    """

    unit: int
    state: ClusterState | Failure
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainReply:
    """A unit's answer after its round; ``state`` as in ``StateReply``."""

    weights: Tensors
    report: ClusterReport
    state: ClusterState | Failure
