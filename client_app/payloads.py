"""What a unit could send in a round: all payloads that a scheduler may choose."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from collapipe.sections import CompressionSettings, PrecisionOrAuto
from collapipe.state import HeadPlace, Payload, Precision

Bits = Callable[[Precision], float]
"""Of what is sent in a precision."""

# ρ = E‖Δg‖²/φ² of the encoder's gradient, activations rounded as they are sent, and ‖Δd‖²/‖d‖² of a
# round's change of the weights: the largest that benchmarks/gradient_error.py found.
ACTIVATION_ERRORS: Mapping[Precision, float] = {
    "float32": 0.0,
    "bfloat16": 4.4e-6,
    "int8": 2.1e-5,
    "int6": 3.0e-4,
    "int4": 5.3e-3,
}
UPLOAD_ERRORS: Mapping[Precision, float] = {
    "float32": 0.0,
    "bfloat16": 3.4e-6,
    "int8": 3.5e-5,
    "int6": 5.8e-4,
    "int4": 1.1e-2,
}


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """What a unit sends with its head in one place; no activations if the head is on the unit."""

    head: HeadPlace | None  # None: the scheduler does not decide it
    model_bits: Bits
    activation_bits: Bits | None


def payloads(compression: CompressionSettings, heads: Sequence[HeadChoice]) -> tuple[Payload, ...]:
    """All that ``auto`` leaves open, those with the least error first.

    The errors of both precisions add up: what rounding takes from an upload counts, though error
    feedback gives it back later. A precision that is set, not chosen, counts as exact.
    """
    offered = itertools.chain.from_iterable(_payloads(compression, each) for each in heads)
    return tuple(sorted(offered, key=lambda each: each.gradient_error))


def _payloads(compression: CompressionSettings, chosen: HeadChoice) -> Iterator[Payload]:
    activations = _choices(compression.activation, ACTIVATION_ERRORS)
    if chosen.activation_bits is None:
        activations = _choices("float32", ACTIVATION_ERRORS)
    uploads = _choices(compression.upload, UPLOAD_ERRORS)
    # Once for each precision: what a link will carry is counted on batches.
    sent = chosen.activation_bits or (lambda _: 0.0)
    sizes = {each: sent(each) for each in activations}
    weights = {each: chosen.model_bits(each) for each in uploads}
    for activation, upload in itertools.product(activations, uploads):
        error = activations[activation] + uploads[upload]
        bits = weights[upload], sizes[activation]
        yield Payload(activation, upload, *bits, gradient_error=error, head=chosen.head)


def _choices(
    precision: PrecisionOrAuto, among: Mapping[Precision, float]
) -> Mapping[Precision, float]:
    return among if precision == "auto" else {precision: 0.0}
