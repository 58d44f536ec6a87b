"""Messages between server and units, before they become Flower's records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from collapipe.errors import WireError, is_printable
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport
from collapipe.sections import Positive
from collapipe.state import ClusterState
from collapipe.statistics import Statistics
from collapipe.tensors import Tensors
from collapipe.text.labels import MOST_LABELS, fault_of_label
from collapipe.text.words import LETTERS, LONGEST_WORD


def _printable(name: str) -> str:
    if not is_printable(name):
        raise WireError("a unit's name must be printable")
    return name


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """How a unit reaches the decoder for one round. Keys and token never appear in a log.

    A deployed server says neither certificate nor name, for its units know better.
    """

    address: str
    server_certificate: bytes  # PEM, the only one that the unit accepts, or who signs it
    server_name: str  # in that certificate
    unit_key: bytes  # PEM, the same for all units of a run
    unit_certificate: bytes  # PEM, what the server asks of every connection
    token: str  # good for one unit, round and stream

    def __repr__(self) -> str:
        return f"LinkAddress(address={self.address!r})"


Told = Annotated[int, Field(ge=1)]
# as its owner calls a unit; printable, and empty where nobody does
UnitName = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
MOST_WORDS = 2**20  # of a unit
_MOST = {"labels": MOST_LABELS, "words": MOST_WORDS}
_FEWER = {"labels": "", "words": "; raise data.tokenizer_min_rows to send fewer"}
_MOST_TOLD = 2**27  # a tokeniser counts as many words in minutes


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Asks a unit of its training rows; ``words``: whether the run is yet to make its tokeniser."""

    words: bool


@dataclass(frozen=True, slots=True)
class RowsReply:
    """What a unit tells of its training rows: how many, how often each label stands in them, and
    each word of which the run makes its tokeniser. Raises ``WireError`` beyond bounds."""

    unit: int
    num_rows: Annotated[int, Field(ge=1, lt=2**53)]
    labels: Mapping[str, Told]
    words: Mapping[str, Told]
    name: UnitName = ""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            each: Mapping[str, int] = getattr(self, name)
            if len(each) > most or sum(each.values()) > _MOST_TOLD:
                raise WireError(
                    f"{len(each):,} {name}, {sum(each.values()):,} in all; at most {most:,}, and "
                    f"{_MOST_TOLD:,} in all" + _FEWER[name]
                )
        if not all(0 < len(word) <= LONGEST_WORD for word in self.words):
            raise WireError(f"words must be of 1 to {LONGEST_WORD} letters")
        if fault := next(filter(None, map(fault_of_label, self.labels)), None):
            raise WireError(fault)
        if not LETTERS.issuperset(chain.from_iterable(self.words)):
            raise WireError("words must be of the letters that stand for bytes")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a unit must know of a run before its first round."""

    tokenizer: str  # as Tokenizer.pack makes it
    frozen: Mapping[str, str]  # part of the model → digest of its weights that do not train
    unit: int | None = None  # who the unit is in this run; None: by the number that it has


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The server's message to a unit, without tensors; ``link`` is None where the unit has the
    head. The server remembers activations of the unit since the round ``remembered``; 0: none.
    The unit's change of the weights is clipped to the norm ``clip_norm``; None: it is not.
    ``arrived`` as in ``KeepRequest``."""

    round: int
    plan: ClusterPlan
    timeout_s: float
    link: LinkAddress | None
    remembered: int = 0
    clip_norm: Positive | None = None
    arrived: int = 0


OPTIMIZER, RESIDUAL, STEM, SLOWNESS = "optimizer", "residual", "stem", "slowness"
ACTIVATIONS = "activations", "last_activations"
NOT_TRAINED = STEM, SLOWNESS
KEPT = OPTIMIZER, RESIDUAL, *NOT_TRAINED, *ACTIVATIONS
"""Names of the groups of tensors that a unit keeps between rounds; those that are NOT_TRAINED are
not made of gradients."""
STEM_ROWS = "kept"  # the one tensor of the stem's account


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Asks a unit for what it keeps. ``arrived`` is the last round of which the server got the
    unit's answer, whatever it made of it; 0: of none since the run began or went on."""

    arrived: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The last round that is in what a unit keeps; in its state, beside its ``Setup``."""

    round: int


Split = Literal["validation", "test"]


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """The server's message to a unit with a model, which the unit shall evaluate on its own rows of
    a split."""

    split: Split
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    """A unit's answer; ``statistics`` is None where it has no rows of the split."""

    unit: int
    statistics: Statistics | None


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
    name: UnitName = ""


@dataclass(frozen=True, slots=True)
class TrainReply:
    """A unit's answer after its round; ``state`` as in ``StateReply``.

    ``head_state`` is what the optimiser of a head remembers that may train elsewhere next time.
    """

    weights: Tensors
    report: ClusterReport
    state: ClusterState | Failure
    head_state: Tensors = field(default_factory=dict)
