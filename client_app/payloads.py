"""The payloads that a scheduler may choose, and each round's measurement of their rounding."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from torch import Tensor

from collapipe.report import BENCHMARKED, RoundingErrors
from collapipe.sections import CompressionSettings, PrecisionOrAuto
from collapipe.state import HeadPlace, Payload, Precision
from collapipe.wire.compression.codec import FLOAT32, change_of, squared_error

Bits = Callable[[Precision], float]
"""Returns the bits that are sent in a precision."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Upper bound of a gradient's ρ divided by ‖a − a_q‖²/‖a‖² of stochastically rounded activations a:
# the largest ratio that benchmarks/gradient_error.py found.
GRADIENT_GAIN = 0.32
_ROUNDED: tuple[Precision, ...] = tuple(each for each in PRECISIONS if each != FLOAT32)
_SAMPLED = 2**18  # least number of values that are sampled from a large weight matrix


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """A unit's bits with its head in one place; no activations if the head is on the unit."""

    head: HeadPlace | None  # None: the scheduler does not decide it
    model_bits: Bits
    activation_bits: Bits | None


def payloads(compression: CompressionSettings, heads: Sequence[HeadChoice]) -> tuple[Payload, ...]:
    """Return all payloads that ``auto`` allows, sorted by their benchmarked error."""
    offered = itertools.chain.from_iterable(_payloads(compression, each) for each in heads)
    return tuple(sorted(offered, key=lambda each: each.gradient_error))


def _payloads(compression: CompressionSettings, chosen: HeadChoice) -> Iterator[Payload]:
    activations = _choices(compression.activation if chosen.activation_bits else "float32")
    uploads = _choices(compression.upload)
    # Computed once for each precision, because the link's bits are counted on batches.
    sent = chosen.activation_bits or (lambda _: 0.0)
    sizes = {each: sent(each) for each in activations}
    weights = {each: chosen.model_bits(each) for each in uploads}
    for activation, upload in itertools.product(activations, uploads):
        error = compression.rounding_error(activation, upload, BENCHMARKED)
        bits = weights[upload], sizes[activation]
        yield Payload(activation, upload, *bits, gradient_error=error, head=chosen.head)


def _choices(precision: PrecisionOrAuto) -> Sequence[Precision]:
    return PRECISIONS if precision == "auto" else (precision,)


@dataclass(frozen=True, slots=True)
class _Squares:
    """‖x‖² of a tensor, and ‖x − x_q‖² by precision."""

    whole: float
    lost: Mapping[Precision, float]

    @classmethod
    def of(cls, tensor: Tensor, by_chance: bool, stands_for: float = 1.0) -> "_Squares":
        """Compute the squares of ``tensor`` times the number of tensors that it represents."""
        lost = {each: stands_for * squared_error(tensor, each, by_chance) for each in _ROUNDED}
        return cls(stands_for * float(tensor.double().square().sum()), lost)


def _shares(squares: Collection[_Squares]) -> dict[Precision, float]:
    """Return ‖x − x_q‖²/‖x‖² over all tensors, independent of their order; empty without
    tensors."""
    if not squares:
        return {}
    whole = math.fsum(each.whole for each in squares) or 1.0  # zeros have no error
    return {q: math.fsum(each.lost[q] for each in squares) / whole for q in _ROUNDED}


@dataclass
class ActivationMeter:
    """Measures the activations of a round's first step before stochastic rounding."""

    _step: int | None = None
    # by micro-batch, because a repeated step sends its micro-batches again
    _seen: dict[int, _Squares] = field(default_factory=dict)

    def take(self, step: int, micro_batch: int, sent: Tensor) -> None:
        """Add the rows ``sent`` of a micro-batch, before rounding."""
        if self._step is None:
            self._step = step
        if step == self._step and micro_batch not in self._seen:
            self._seen[micro_batch] = _Squares.of(sent, by_chance=True)

    def errors(self) -> dict[Precision, float]:
        """Return ρ by precision; empty if nothing was sent."""
        return {q: GRADIENT_GAIN * each for q, each in _shares(self._seen.values()).items()}


def measured(
    compression: CompressionSettings,
    meter: ActivationMeter | None,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
) -> RoundingErrors:
    """Return the rounding errors of the precisions that the scheduler chooses.

    ``start`` and ``end`` are the weights before and after a round; ``residual`` as in
    ``compress_update``.
    """
    upload = dict[Precision, float]()
    if compression.upload == "auto":
        floats = {name: each for name, each in end.items() if each.is_floating_point()}
        changes = (change_of(name, start, each, residual) for name, each in floats.items())
        upload = _shares([_sampled(change) for change in changes])
    return RoundingErrors(meter.errors() if meter else {}, upload)


def _sampled(change: Tensor) -> _Squares:
    """Compute the squares of a change under rounding to the nearest. Of a large matrix, evenly
    spaced rows are sampled."""
    if change.dim() < 2 or change.numel() < 2 * _SAMPLED:
        return _Squares.of(change, by_chance=False)
    sample = change[:: change.numel() // _SAMPLED]
    return _Squares.of(sample, by_chance=False, stands_for=len(change) / len(sample))
