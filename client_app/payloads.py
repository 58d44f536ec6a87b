"""The payloads that a scheduler may choose for a unit's round."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from collapipe.rounding_errors import BENCHMARKED
from collapipe.sections import CompressionSettings, PrecisionOrAuto
from collapipe.state import HeadPlace, Payload, Precision

Bits = Callable[[Precision], float]
"""Returns the bits that are sent in a precision."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


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
