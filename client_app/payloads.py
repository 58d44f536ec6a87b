"""What a unit could send in a round: its payloads in all precisions that a scheduler may choose."""

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

from collapipe.sections import CompressionSettings
from collapipe.state import Payload, Precision

Bits = Callable[[Precision], float]
"""Of what is sent in a precision."""

# ρ = E‖Δg‖²/‖g‖² of the encoder's gradient, activations rounded as they are sent, and of a round's
# change of the weights: the largest that were measured (docs/compression.md).
ACTIVATION_ERRORS: Mapping[Precision, float] = {
    "float32": 0.0,
    "bfloat16": 1e-5,
    "int8": 9e-5,
    "int6": 5.6e-4,
    "int4": 8.8e-3,
}
UPLOAD_ERRORS: Mapping[Precision, float] = {
    "float32": 0.0,
    "bfloat16": 1e-5,
    "int8": 1e-4,
    "int6": 2e-3,
    "int4": 4e-2,
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
    offered = (
        Payload(
            activation,
            upload,
            model_bits(upload),
            activation_bits(activation) if activation_bits else 0.0,
            activations[activation] + uploads[upload],
        )
        for activation, upload in itertools.product(activations, uploads)
    )
    return tuple(sorted(offered, key=lambda each: each.gradient_error))


def _choices(
    precision: Precision | Literal["auto"], among: Mapping[Precision, float]
) -> Mapping[Precision, float]:
    return among if precision == "auto" else {precision: 0.0}
