"""A unit's round of training: prepare, run, report. Independent of Flower."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from client_app.arrival import taken_s
from client_app.control_unit import ControlUnit, StemRows, change_coder, stem_rows
from client_app.devices.round_pipeline import DeviceFigures
from client_app.payloads import ActivationMeter, measured
from client_app.trainers import RoundTrainer, Start, open_trainer
from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError, WireError, way_out_of_divergence
from collapipe.models.dropout import DropoutKey
from collapipe.models.frozen import FrozenParts
from collapipe.models.part import prefixed, select
from collapipe.models.split import HEAD
from collapipe.models.stem import StemSpec
from collapipe.process import cancellation
from collapipe.report import START, ClusterReport
from collapipe.secure_aggregation.messages import MaskRequest
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.secure_aggregation.unit import MaskedUnit, UnitWithShares
from collapipe.seeds import derive
from collapipe.tensors import Tensors
from collapipe.wire import messages
from collapipe.wire.compression.codec import FLOAT32, compress_update
from collapipe.wire.records import MASKED


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """The secrets and the request that mask an update, and the digest ``terms`` of what the unit
    received, which the masks of the others must share."""

    stage: UnitWithShares
    request: MaskRequest
    terms: bytes


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """The inputs of a unit's round, from the server and from the unit's state."""

    request: messages.TrainRequest
    weights: Tensors  # trainable weights, which are returned
    fixed: FrozenParts
    head_state: Tensors  # of the optimiser of a head that trained elsewhere in the last round
    kept: Mapping[str, Tensors]  # the unit's state after its last round, by group
    masks: MaskInputs | None = None  # None: the update is not masked


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The reply to the server, the state that the unit keeps, and after a masked update the secrets
    for unmasking the sum."""

    reply: messages.TrainReply
    kept: Mapping[str, Tensors]
    masked: MaskedUnit | None


@dataclass(frozen=True, slots=True)
class _Step:
    """A local step: its batch's mean loss over target tokens, and the gradient's squared norm."""

    loss: float
    squared_norm: float
    samples: int
    target_tokens: int
    input_tokens: int


@dataclass(frozen=True, slots=True)
class _Trained:
    """A round after its last step; ``alive`` are the real devices that are known to be alive.

    The ``report`` has no rounding errors yet: ``_report`` adds them.
    """

    weights: Tensors
    optimizer_state: Tensors
    report: ClusterReport
    alive: Collection[str]


def run_round(unit: ControlUnit, inputs: RoundInputs) -> RoundResult:
    """Train a round for the request.

    Raises ``NonFiniteLossError``, ``LinkError``, ``CancelledRoundError``, ``RoundFailedError`` if
    all devices are lost, or ``WireError`` if what the unit kept or the request is invalid.
    """
    kept, compression = inputs.kept, unit.settings.compression
    received = inputs.weights
    if inputs.masks or compression.upload != FLOAT32:  # training changes weights in place
        received = {name: tensor.clone() for name, tensor in received.items()}
    unit.recall_times(kept)
    stem = stem_rows(unit, kept)
    start = Start(
        weights=inputs.weights,
        fixed=inputs.fixed,
        state=kept.get(messages.OPTIMIZER, {}) | inputs.head_state,
        stem_limit_bytes=stem.limit_bytes,
        coder=change_coder(unit, inputs.request, kept),
        meter=ActivationMeter() if compression.activation == "auto" else None,
    )
    trained = _run(unit, inputs.request, start, stem)
    return _report(unit, inputs, received, start, stem, trained)


def _run(
    unit: ControlUnit, request: messages.TrainRequest, start: Start, stem: StemRows
) -> _Trained:
    with open_trainer(unit, request, start) as opened:
        steps = tuple(_steps(unit, request, opened, stem))
        trainer, link = opened.trainer, opened.link
        trainer.timer.seconds[START] += trainer.timer.began_s - taken_s()
        weights, optimizer_state = trainer.weights(), trainer.optimizer_state()
        figures = opened.devices.figures() if opened.devices else DeviceFigures()
        report = ClusterReport(
            unit=unit.number,
            losses=tuple(each.loss for each in steps),
            samples=sum(each.samples for each in steps),
            target_tokens=sum(each.target_tokens for each in steps),
            input_tokens=sum(each.input_tokens for each in steps),
            seconds=dict(trainer.timer.seconds),
            link_bytes_up=link.bytes_up if link else 0,
            link_bytes_down=link.bytes_down if link else 0,
            squared_norms=tuple(each.squared_norm for each in steps),
            stem_rows=stem.computed if isinstance(unit.settings.model, StemSpec) else 0,
            devices=figures.reports,
            events=figures.events,
            traces=figures.traces,
        )
        return _Trained(weights, optimizer_state, report, figures.alive)


def _steps(
    unit: ControlUnit, request: messages.TrainRequest, opened: RoundTrainer, stem: StemRows
) -> Iterator[_Step]:
    """Run the round's local steps, one by one."""
    settings, trainer = unit.settings, opened.trainer
    for step in settings.federation.steps_of(request.round):
        cancellation.check()
        batch, rows = unit.batch(step)
        rate = settings.optimizer.rate(step, settings.federation.total_steps)
        try:
            loss = trainer.run(batch, DropoutKey(settings.seed, unit.number, step))
            if not math.isfinite(loss):
                raise NonFiniteLossError(f"the loss is {loss}")
            squared_norm = trainer.step(rate, settings.optimizer.clip_norm)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"round {request.round}, step {step}: {error}; {way_out_of_divergence(step)}"
            ) from error
        stem.take(rows.numpy())
        yield _Step(loss, squared_norm, batch.num_samples, batch.num_targets, batch.num_inputs)


def _report(
    unit: ControlUnit,
    inputs: RoundInputs,
    received: Tensors,
    start: Start,
    stem: StemRows,
    trained: _Trained,
) -> RoundResult:
    """Return the round's result; ``received`` are the weights before the training."""
    end = {name: trained.weights[name] for name in inputs.weights}
    lacking = {} if inputs.masks else inputs.kept.get(messages.RESIDUAL, {})
    sent, residual, masked = _sent(unit, inputs, received, end)
    own, head_state = _split_state(unit, trained.optimizer_state)
    times = unit.devices.kept() if unit.devices else {}
    kept = {**inputs.kept, **times, messages.RESIDUAL: residual}
    if own is not None:
        kept[messages.OPTIMIZER] = own
    if stem.kept.any():
        rows = torch.from_numpy(np.flatnonzero(stem.kept))
        kept[messages.STEM] = {messages.STEM_ROWS: rows}
    if (coder := start.coder) is not None:  # keep both: the next request selects one
        kept |= zip(messages.ACTIVATIONS, (coder.known.pack(), coder.arrived.pack()), strict=True)
    rounding = measured(unit.settings.compression, start.meter, received, end, lacking)
    report = replace(trained.report, rounding=rounding)
    state = unit.state(trained.alive)
    return RoundResult(messages.TrainReply(sent, report, state, head_state), kept, masked)


def _sent(
    unit: ControlUnit, inputs: RoundInputs, start: Tensors, end: Tensors
) -> tuple[Tensors, Tensors, MaskedUnit | None]:
    """Return the tensors that encode the weights ``end``, the residual of their rounding, and after
    a masked update the unit's secrets."""
    if inputs.masks is not None:
        masked, vector = _masked_update(inputs.masks, inputs.request, start, end, unit.settings)
        return vector, {}, masked
    precision = unit.settings.compression.of(inputs.request.plan.uplink).upload
    sent, residual = compress_update(start, end, inputs.kept.get(messages.RESIDUAL, {}), precision)
    return sent, residual, None


def _split_state(unit: ControlUnit, state: Tensors) -> tuple[Tensors | None, Tensors]:
    """Split the optimiser's ``state`` into the unit's part and the head's part.

    The unit's part is None if the optimiser keeps no state. The head's part goes to the server if
    the scheduler chooses where the head trains next; else it is empty.
    """
    if unit.settings.optimizer.state != "keep":
        return None, {}
    if not unit.settings.chooses_heads:
        return state, {}
    head_state = prefixed(HEAD, select(state, HEAD))
    return {key: each for key, each in state.items() if key not in head_state}, head_state


def _masked_update(
    masks: MaskInputs,
    request: messages.TrainRequest,
    start: Tensors,
    end: Tensors,
    settings: Settings,
) -> tuple[MaskedUnit, Tensors]:
    """Mask the change from ``start`` to ``end``. Returns the state that the unit keeps until the
    sum is unmasked, and the tensors to send.

    The change is clipped and gets the unit's share of the noise if units add it. Integer tensors
    are not sent. Random rounding derives from the run's seed, so that a round can be repeated.
    Raises ``WireError`` or ``NonFiniteLossError``.
    """
    if request.clip_norm is None:
        raise WireError("a masked update needs privacy.clip_norm, which the server did not send")
    changes = [end[name] - start[name] for name in sorted(end) if end[name].is_floating_point()]
    change = torch.cat([each.reshape(-1) for each in changes]).numpy()
    stage, privacy = masks.stage, settings.privacy
    quantiser = Quantiser.of(
        settings.compression.upload, privacy, change.size, request.clip_norm, stage.num_units
    )
    seed = derive(settings.seed, "rounding", stage.unit, request.round)
    noise = None
    if privacy.noise_seed is not None:
        noise = derive(privacy.noise_seed, "privacy", stage.unit, request.round)
    words = quantiser.quantise(change, np.random.default_rng(seed), noise)
    masked = stage.mask(request.round, masks.request, words, masks.terms)
    return masked, {MASKED: torch.from_numpy(quantiser.pack(words))}
