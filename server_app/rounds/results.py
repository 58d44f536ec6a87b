"""What a round leaves: its result, and all that training has come to."""

from collections.abc import Callable
from dataclasses import dataclass, field

from collapipe.report import RoundReport
from collapipe.tensors import Tensors
from optim.planner import RoundRequest
from server_app.rounds.scheduler import SchedulerState
from server_app.units import Kept


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What training has come to; all empty in a run that does not train.

    Attributes
    ----------
    weights
        The whole model; where models are not averaged, the one that all units began with.
    own_models
        Of units, where models are not averaged.
    server_optimizer
        Memory of the server's step.
    heads
        Memory of the heads' optimisers, by unit.
    units
        Of each unit: its optimiser's memory, and what its compressed uploads have lacked so far.
    """

    weights: Tensors = field(default_factory=dict)
    own_models: dict[int, Tensors] = field(default_factory=dict)
    server_optimizer: Tensors = field(default_factory=dict)
    heads: dict[int, Tensors] = field(default_factory=dict)
    units: dict[int, Kept] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round that is over.

    Attributes
    ----------
    request
        What it was planned from.
    seconds
        Wall time of its phases: ``send`` (in which ``plan``), ``train`` and ``aggregate``, and of
        the whole ``round``.
    weights, own_models
        As in ``TrainingState``.
    scheduler
        What the scheduler's next decision needs.
    frozen_bytes
        Of weights that do not train, sent to units so far in this run.
    training_state
        Asks the units for what they keep. Raises ``RoundFailedError`` or ``WireError``.
    """

    report: RoundReport
    request: RoundRequest
    seconds: dict[str, float]
    weights: Tensors
    own_models: dict[int, Tensors]
    scheduler: SchedulerState
    frozen_bytes: int
    training_state: Callable[[], TrainingState]
