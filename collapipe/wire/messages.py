"""Messages between server and units, before they become Flower's records."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport
from collapipe.state import ClusterState
from collapipe.tensors import Tensors


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """How a unit reaches the decoder for one round. Keys and token never appear in a log."""

    address: str
    server_certificate: bytes  # PEM, the only one that the unit accepts
    unit_key: bytes  # PEM, the same for all units of a run
    unit_certificate: bytes  # PEM, what the server asks of every connection
    token: str  # good for one unit, round and stream

    def __repr__(self) -> str:
        return f"LinkAddress(address={self.address!r})"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a unit must know of a run before its first round."""

    tokenizer: str  # as Tokenizer.pack makes it
    frozen: Mapping[str, str]  # part of the model → digest of its weights that do not train


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The server's message to a unit, without tensors; ``link`` is None where the unit has the
    head. The server remembers activations of the unit since the round ``remembered``; 0: none."""

    round: int
    plan: ClusterPlan
    timeout_s: float
    link: LinkAddress | None
    remembered: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a unit did not do what it was asked to: the error's name and its one line."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class StateReply:
    """A unit's cluster, a ``Failure`` where what it sent is none, and the frozen parts of the model
    that it lacks."""

    unit: int
    state: ClusterState | Failure
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainReply:
    """A unit's answer after its round; ``state`` as in ``StateReply``.

    ``head_state`` is what the optimiser of a head remembers that may train elsewhere next time.
    """

    weights: Tensors
    report: ClusterReport
    state: ClusterState | Failure
    head_state: Tensors = field(default_factory=dict)
