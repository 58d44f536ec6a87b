"""What server and units tell each other in a round, before it becomes Flower's records."""

from dataclasses import dataclass

from collapipe.models.part import Tensors
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """How a unit reaches the decoder for one round. ``token`` never appears in a log."""

    address: str
    certificate: bytes
    token: str

    def __repr__(self) -> str:
        return f"LinkAddress(address={self.address!r})"


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The server's message to a scheduled unit, beside the weights that travel with it; ``link`` is
    None where the unit has the head."""

    round: int
    plan: ClusterPlan
    timeout_s: float
    link: LinkAddress | None


@dataclass(frozen=True, slots=True)
class TrainReply:
    """A unit's answer after its round."""

    weights: Tensors
    report: ClusterReport


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a unit did not finish: the error's name and its one line."""

    kind: str
    message: str
