"""What rounding would do to what a unit sends, measured in each round for the scheduler."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from client_app.payloads import PRECISIONS
from collapipe.rounding import RoundingErrors
from collapipe.sections import CompressionSettings
from collapipe.state import Precision
from collapipe.wire.compression import FLOAT32, change_of, squared_error

# ρ of a gradient is at most so many times ‖a − a_q‖²/‖a‖² of the activations a that were rounded
# by chance: the largest that benchmarks/gradient_error.py found.
GRADIENT_GAIN = 0.32
_ROUNDED: tuple[Precision, ...] = tuple(each for each in PRECISIONS if each != FLOAT32)
_SAMPLED = 2**18  # values of a weight matrix, at least, whose rows are looked at


@dataclass(frozen=True, slots=True)
class _Squares:
    """‖x‖² of a tensor, and by precision ‖x − x_q‖²."""

    whole: float
    lost: Mapping[Precision, float]

    @classmethod
    def of(cls, tensor: Tensor, by_chance: bool, stands_for: float = 1.0) -> "_Squares":
        """Of as many tensors as ``tensor`` stands for."""
        lost = {each: stands_for * squared_error(tensor, each, by_chance) for each in _ROUNDED}
        return cls(stands_for * float(tensor.double().square().sum()), lost)


def _shares(squares: Collection[_Squares]) -> dict[Precision, float]:
    """‖x − x_q‖²/‖x‖² of all together, whatever their order; empty where there are none."""
    if not squares:
        return {}
    whole = math.fsum(each.whole for each in squares) or 1.0  # nothing is lost of zeros
    return {q: math.fsum(each.lost[q] for each in squares) / whole for q in _ROUNDED}


@dataclass
class ActivationMeter:
    """Looks at the activations of a round's first step, before they are rounded by chance."""

    _step: int | None = None
    # by micro-batch, which is sent again where a step is done again
    _seen: dict[int, _Squares] = field(default_factory=dict)

    def take(self, step: int, micro_batch: int, sent: Tensor) -> None:
        """Rows ``sent``, as they would travel in float32."""
        if self._step is None:
            self._step = step
        if step == self._step and micro_batch not in self._seen:
            self._seen[micro_batch] = _Squares.of(sent, by_chance=True)

    def errors(self) -> dict[Precision, float]:
        """ρ by precision; empty where nothing was sent."""
        return {q: GRADIENT_GAIN * each for q, each in _shares(self._seen.values()).items()}


def measured(
    compression: CompressionSettings,
    meter: ActivationMeter | None,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
) -> RoundingErrors:
    """What the scheduler is told of precisions that it chooses; ``start`` to ``end`` are the
    weights of a round, see ``compress_update``."""
    upload = dict[Precision, float]()
    if compression.upload == "auto":
        floats = {name: each for name, each in end.items() if each.is_floating_point()}
        changes = (change_of(name, start, each, residual) for name, each in floats.items())
        upload = _shares([_sampled(change) for change in changes])
    return RoundingErrors(meter.errors() if meter else {}, upload)


def _sampled(change: Tensor) -> _Squares:
    """Of a change, rounded to the nearest; of a large matrix rows that are evenly apart."""
    if change.dim() < 2 or change.numel() < 2 * _SAMPLED:
        return _Squares.of(change, by_chance=False)
    sample = change[:: change.numel() // _SAMPLED]
    return _Squares.of(sample, by_chance=False, stands_for=len(change) / len(sample))
