"""A unit's round of training: what it sends of the weights, and what it keeps for the next round.

Knows nothing of Flower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from client_app.control_unit import ControlUnit
from client_app.masked_update import masked_update
from client_app.rounding import ActivationMeter, measured
from collapipe.config import Settings
from collapipe.models.part import prefixed, select
from collapipe.models.split import HEAD
from collapipe.secure_aggregation.messages import MaskRequest
from collapipe.secure_aggregation.unit import MaskedUnit, UnitWithShares
from collapipe.tensors import Tensors
from collapipe.wire.compression import FLOAT32, compress_update
from collapipe.wire.messages import (
    ACTIVATIONS,
    OPTIMIZER,
    RESIDUAL,
    SLOWNESS,
    STEM,
    STEM_ROWS,
    TrainReply,
    TrainRequest,
)


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """``weights`` train and come back, ``fixed`` do not; ``frozen`` are the digests of the parts
    of these. ``head_state`` is what the optimiser of a head remembers that trained elsewhere,
    ``kept`` what the last round left, and ``masks`` hide the update, if it is to be hidden."""

    request: TrainRequest
    weights: Tensors
    fixed: Tensors
    frozen: Mapping[str, str]
    head_state: Tensors
    kept: Mapping[str, Tensors]
    masks: tuple[UnitWithShares, MaskRequest] | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The answer, what to keep in place of what was kept, and of a masked update what later takes
    off others' masks."""

    reply: TrainReply
    kept: Mapping[str, Tensors]
    masked: MaskedUnit | None


def run_round(unit: ControlUnit, settings: Settings, given: RoundInputs) -> RoundResult:
    """Train as the request says. Raises what ``ControlUnit.train`` does, or ``WireError``."""
    request, compression, kept = given.request, settings.compression, dict(given.kept)
    start = given.weights
    if given.masks or compression.upload != FLOAT32:  # training changes weights in place
        start = {name: tensor.clone() for name, tensor in start.items()}
    stem = unit.stem_rows(kept.get(STEM, {}).get(STEM_ROWS))
    coder = None
    if compression.feedback and request.link is not None:
        coder = unit.change_coder(request, *(kept.get(key, {}) for key in ACTIVATIONS))
    meter = ActivationMeter() if compression.activation == "auto" else None
    whole, state = {**given.fixed, **given.weights}, kept.get(OPTIMIZER, {}) | given.head_state
    unit.slowness = kept.get(SLOWNESS, {})
    reply, state = unit.train(request, whole, state, stem, given.frozen, coder, meter)
    kept[SLOWNESS] = unit.slowness
    end = {name: reply.weights[name] for name in given.weights}
    lacking = {} if given.masks else kept.get(RESIDUAL, {})
    sent, kept[RESIDUAL], masked = _sent(settings, given, start, end)
    rounding = measured(compression, meter, start, end, lacking)
    own, head_state = _remembered(settings, state)
    if own is not None:
        kept[OPTIMIZER] = own
    if stem.kept.any():
        kept[STEM] = {STEM_ROWS: torch.from_numpy(np.flatnonzero(stem.kept))}
    if coder is not None:  # whether the round counts, the next request says
        kept |= zip(ACTIVATIONS, (coder.known.pack(), coder.arrived.pack()), strict=True)
    report = replace(reply.report, rounding=rounding)
    reply = replace(reply, weights=sent, report=report, head_state=head_state)
    return RoundResult(reply, kept, masked)


def _sent(
    settings: Settings, given: RoundInputs, start: Tensors, end: Tensors
) -> tuple[Tensors, Tensors, MaskedUnit | None]:
    """What travels in place of the weights ``end``, and what rounding took of them."""
    if given.masks is not None:
        stage, shares = given.masks
        masked, vector = masked_update(stage, given.request, shares, start, end, settings)
        return vector, {}, masked
    precision = settings.compression.of(given.request.plan.uplink).upload
    sent, residual = compress_update(start, end, given.kept.get(RESIDUAL, {}), precision)
    return sent, residual, None


def _remembered(settings: Settings, state: Tensors) -> tuple[Tensors | None, Tensors]:
    """What the unit keeps of its optimiser's ``state``, None: nothing new; and what the server
    keeps, who says where a head trains next."""
    if settings.optimizer.state != "keep":
        return None, {}
    if not settings.chooses_heads:
        return state, {}
    head_state = prefixed(HEAD, select(state, HEAD))
    return {key: each for key, each in state.items() if key not in head_state}, head_state
