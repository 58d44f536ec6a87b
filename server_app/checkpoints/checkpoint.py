"""All that a round leaves to the next ones, so that a run can go on from there.

There are no generators to keep: whatever is random is drawn from the seed, a purpose and the number
of the round or step, and so is the order of a unit's rows.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from server_app.records.summary import History
from server_app.scheduler import SchedulerState

Kept = dict[str, Tensors]  # what a unit keeps between rounds, by its names of it


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
class Learned:
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
class Checkpoint:
    """A run after a round; ``configuration`` is its resolved tree."""

    configuration: Mapping[str, Any]
    progress: Progress
    learned: Learned


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


def flat(learned: Learned) -> Tensors:
    """All tensors under ``GROUP/NAME``, such as ``units.2.optimizer/embedding.weight/exp_avg``."""
    groups = {"weights": learned.weights, "server_optimizer": learned.server_optimizer}
    groups |= {f"own_models.{unit}": model for unit, model in learned.own_models.items()}
    groups |= {f"heads.{unit}": state for unit, state in learned.heads.items()}
    groups |= {
        f"units.{unit}.{key}": tensors
        for unit, kept in learned.units.items()
        for key, tensors in kept.items()
    }
    return {
        f"{group}/{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def nested(tensors: Mapping[str, Any]) -> Learned:
    """See ``flat``. Raises ``ValueError`` for a name that it does not give."""
    learned = Learned()
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        match group.split("."):
            case ["weights"]:
                learned.weights[name] = tensor
            case ["server_optimizer"]:
                learned.server_optimizer[name] = tensor
            case ["own_models", unit]:
                learned.own_models.setdefault(int(unit), {})[name] = tensor
            case ["heads", unit]:
                learned.heads.setdefault(int(unit), {})[name] = tensor
            case ["units", unit, key]:
                learned.units.setdefault(int(unit), {}).setdefault(key, {})[name] = tensor
            case _:
                raise ValueError(f"a tensor {full[:80]!r} belongs to nothing")
    return learned
