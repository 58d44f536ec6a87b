"""All that a round leaves to the next ones, so that a run can go on from there.

There are no generators to keep: whatever is random is drawn from the seed, a purpose and the number
of the round or step, and so is the order of a unit's rows.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from server_app.records.summary import History
from server_app.rounds.results import TrainingState
from server_app.rounds.scheduler import SchedulerState


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes
    ----------
    round
        The last one that is over.
    wall_s
        Seconds that the run has taken, all its parts together.
    tokenizer
        See ``tokenizer_digest``.
    sizes
        Bytes of the run's files that grow.
    scheduler
        Queues, losses, reports, estimates, the clock and the environment.
    """

    round: int
    wall_s: float
    tokenizer: str
    sizes: dict[str, int]
    scheduler: SchedulerState
    history: History


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round; ``configuration`` is its resolved tree."""

    configuration: Mapping[str, Any]
    progress: Progress
    training: TrainingState


_PROGRESS = TypeAdapter(Progress)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Tells whether training rows are still those that the tokeniser was made of."""
    return hashlib.sha256(tokenizer.pack().encode()).hexdigest()


def progress_to_json(progress: Progress) -> Any:
    """Plain values; numbers stay what they are."""
    return _PROGRESS.dump_python(progress, mode="json")


def progress_from_json(values: Any) -> Progress:
    """See ``progress_to_json``. Raises ``pydantic.ValidationError``, ``CollaPipeError``."""
    return _PROGRESS.validate_python(values)


def flat(training: TrainingState) -> Tensors:
    """All tensors under ``GROUP/NAME``, such as ``units.2.optimizer/embedding.weight/exp_avg``."""
    groups = {"weights": training.weights, "server_optimizer": training.server_optimizer}
    groups |= {f"own_models.{unit}": model for unit, model in training.own_models.items()}
    groups |= {f"heads.{unit}": state for unit, state in training.heads.items()}
    groups |= {
        f"units.{unit}.{key}": tensors
        for unit, kept in training.units.items()
        for key, tensors in kept.items()
    }
    return {
        f"{group}/{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def nested(tensors: Mapping[str, Any]) -> TrainingState:
    """See ``flat``. Raises ``ValueError`` for a name that it does not give."""
    training = TrainingState()
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        match group.split("."):
            case ["weights"]:
                training.weights[name] = tensor
            case ["server_optimizer"]:
                training.server_optimizer[name] = tensor
            case ["own_models", unit]:
                training.own_models.setdefault(int(unit), {})[name] = tensor
            case ["heads", unit]:
                training.heads.setdefault(int(unit), {})[name] = tensor
            case ["units", unit, key]:
                training.units.setdefault(int(unit), {}).setdefault(key, {})[name] = tensor
            case _:
                raise ValueError(f"a tensor {full[:80]!r} belongs to nothing")
    return training
