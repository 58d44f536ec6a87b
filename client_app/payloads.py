"""What a unit could send in a round: its payloads in all precisions that a scheduler may choose."""

import itertools
from collections.abc import Callable, Mapping

from collapipe.sections import CompressionSettings, PrecisionOrAuto
from collapipe.state import Payload, Precision

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


def payloads(
    compression: CompressionSettings, model_bits: Bits, activation_bits: Bits | None
) -> tuple[Payload, ...]:
    """All that ``auto`` leaves open, those with the least error first.

    The errors of both add up: what rounding takes from an upload counts, though error feedback
    gives it back later. A precision that is set, not chosen, counts as exact. ``activation_bits``
    is None for a unit that sends no activations.
    """
    activations = _choices(compression.activation, ACTIVATION_ERRORS)
    if activation_bits is None:
        activations = {"float32": 0.0}
    uploads = _choices(compression.upload, UPLOAD_ERRORS)
    # Once for each precision: what a link will carry is counted on batches.
    sizes = {each: activation_bits(each) if activation_bits else 0.0 for each in activations}
    weights = {each: model_bits(each) for each in uploads}
    offered = (
        Payload(
            *(activation, upload, weights[upload], sizes[activation]),
            gradient_error=activations[activation] + uploads[upload],
        )
        for activation, upload in itertools.product(activations, uploads)
    )
    return tuple(sorted(offered, key=lambda each: each.gradient_error))


def _choices(
    precision: PrecisionOrAuto, among: Mapping[Precision, float]
) -> Mapping[Precision, float]:
    return among if precision == "auto" else {precision: 0.0}
