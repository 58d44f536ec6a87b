"""Messages between server and units, before ``wire.records`` converts them to Flower's records."""

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
from collapipe.text.tokenizer import LETTERS, LONGEST_WORD
from collapipe.text.vocabulary import MOST_LABELS, fault_of_label


def _printable(name: str) -> str:
    if not is_printable(name):
        raise WireError("a unit's name must be printable")
    return name


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """How a unit reaches the decoder for one round. Keys and token never appear in a log.

    A deployed server leaves certificate and name empty: its units have them in their credentials.
    """

    address: str
    server_certificate: bytes  # PEM: the only certificate that the unit accepts, or its issuer's
    server_name: str  # in that certificate
    unit_key: bytes  # PEM, the same for all units of a run
    unit_certificate: bytes  # PEM: the server requires it of every connection
    token: str  # valid for one unit, round and stream

    def __repr__(self) -> str:
        return f"LinkAddress(address={self.address!r})"


Count = Annotated[int, Field(ge=1)]
# the owner's name for a unit; printable; empty if the owner gave none
UnitName = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
MOST_WORDS = 2**20  # distinct words that a unit may send
_MOST = {"labels": MOST_LABELS, "words": MOST_WORDS}
_FEWER = {"labels": "", "words": "; raise data.tokenizer_min_rows to send fewer"}
_MOST_IN_ALL = 2**27  # a tokeniser counts that many words in minutes


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Asks a unit about its training rows, and for ``words`` if the run has no tokeniser yet."""

    settings: str  # the run's options, see ``config.resolved``
    words: bool


@dataclass(frozen=True, slots=True)
class RowsReply:
    """A unit's number of training rows, and how often each label and word occurs in them.

    The run makes its tokeniser of the words. Raises ``WireError`` if a count exceeds its bound.
    """

    unit: int
    num_rows: Annotated[int, Field(ge=1, lt=2**53)]
    labels: Mapping[str, Count]
    words: Mapping[str, Count]
    name: UnitName = ""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            each: Mapping[str, int] = getattr(self, name)
            if len(each) > most or sum(each.values()) > _MOST_IN_ALL:
                raise WireError(
                    f"{len(each):,} {name}, {sum(each.values()):,} in all; at most {most:,}, and "
                    f"{_MOST_IN_ALL:,} in all" + _FEWER[name]
                )
        if not all(0 < len(word) <= LONGEST_WORD for word in self.words):
            raise WireError(f"words must be of 1 to {LONGEST_WORD} letters")
        if fault := next(filter(None, map(fault_of_label, self.labels)), None):
            raise WireError(fault)
        if not LETTERS.issuperset(chain.from_iterable(self.words)):
            raise WireError("words must have only the letters of byte-level tokenisers")


@dataclass(frozen=True, slots=True)
class Setup:
    """The facts about a run that a unit needs before its first round."""

    settings: str  # the run's options, see ``config.resolved``
    tokenizer: str  # made by Tokenizer.pack
    frozen: Mapping[str, str]  # part of the model → digest of its frozen weights
    unit: int | None = None  # the unit's number in this run; None: the number it already has


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The server's request to train a round, without tensors.

    A unit that has the head gets no ``link``. The server remembers the unit's activations as of the
    round ``remembered``; 0: none. ``clip_norm`` bounds the norm of the unit's update; None disables
    clipping. ``arrived`` has the same meaning as in ``KeepRequest``.
    """

    round: Count
    plan: ClusterPlan
    timeout_s: float
    link: LinkAddress | None
    remembered: int = 0
    clip_norm: Positive | None = None
    arrived: int = 0


OPTIMIZER, RESIDUAL, STEM, STEP_LAW = "optimizer", "residual", "stem", "step_law"
ACTIVATIONS = "activations", "last_activations"
NOT_TRAINED = STEM, STEP_LAW
KEPT = OPTIMIZER, RESIDUAL, *NOT_TRAINED, *ACTIVATIONS
"""Names of the tensor groups that a unit keeps between rounds; NOT_TRAINED ones are not derived
from gradients."""
STEM_ROWS = "kept"  # the only tensor of the stem's group


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Asks a unit for the state that it keeps between rounds.

    ``arrived`` is the last round whose reply from the unit reached the server, valid or not;
    0: none since the run was started or resumed.
    """

    arrived: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The last round that a unit's state includes; stored in that state, next to ``Setup``."""

    round: int


Split = Literal["validation", "test"]


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """The server's request to evaluate a model on the unit's rows of a split."""

    split: Split
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    """A unit's reply to ``EvaluateRequest``; without rows of the split it has no ``statistics``."""

    unit: int
    statistics: Statistics | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a unit could not serve a request: the error's class name and its one-line message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class StateReply:
    """A unit's cluster, and the frozen parts of the model that the unit lacks.

    ``state`` is a ``Failure`` if the unit sent an invalid cluster.
    """

    unit: int
    state: ClusterState | Failure
    lacking: tuple[str, ...]
    name: UnitName = ""


@dataclass(frozen=True, slots=True)
class TrainReply:
    """A unit's reply after its round; ``state`` has the same meaning as in ``StateReply``.

    ``head_state`` is the optimiser state of the head, which may train elsewhere next round.
    """

    weights: Tensors
    report: ClusterReport
    state: ClusterState | Failure
    head_state: Tensors = field(default_factory=dict)
