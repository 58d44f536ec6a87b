"""A round's pipeline of a control unit's real devices."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from client_app.cluster_state import block_cost
from client_app.devices.copies import Sending, copied_bytes, copy_interval
from client_app.devices.known_devices import Devices
from client_app.devices.measured_law import held_stages
from client_app.devices.plan_after_loss import plan_after_loss
from client_app.devices.plan_news import moved_blocks, without_devices
from collapipe import __version__
from collapipe.config import Settings
from collapipe.errors import InfeasibleRoundError, RoundFailedError
from collapipe.models.description import describe
from collapipe.models.frozen import FrozenParts
from collapipe.models.part import Part
from collapipe.models.split import ModelSpec
from collapipe.plan import ClusterPlan
from collapipe.report import PIPELINE, DeviceReport, DeviceTrace
from collapipe.state import DeviceProfile
from collapipe.tensors import Tensors
from collapipe.wire.compression.codec import sent_share
from collapipe.wire.messages import TrainRequest
from optim.step import step_s, works_of
from pipeline.devices.block_form import BlockForm, block_forms
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.replica import Replica, starting_with
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.messages import RoundDescription
from pipeline.engine import Pipeline
from pipeline.head import PipelineHead
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import first_trained

_HUNG_S, _HUNG_CHUNKS = 10.0, 20.0  # seconds, and planned chunk times, after which a device hangs


@dataclass(frozen=True, slots=True)
class RoundStart:
    """The start of a round: trainable weights, the frozen ones, and the optimiser's state."""

    weights: Tensors
    fixed: FrozenParts
    state: Tensors


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The devices' measurements in a round, a sentence for each event, and the names of the devices
    that are ``alive`` at its end. All are empty without real devices."""

    reports: tuple[DeviceReport, ...] = ()
    events: tuple[str, ...] = ()
    traces: tuple[DeviceTrace, ...] = ()
    alive: frozenset[str] = frozenset()


class DevicePipeline:
    """A round's pipeline of the ``embedding`` and ``devices``, which the inventory ``described``,
    while the context of its ``segments`` is open."""

    def __init__(
        self,
        settings: Settings,
        devices: Devices,
        described: Collection[DeviceProfile],
        request: TrainRequest,
        spec: ModelSpec,
        start: RoundStart,
        embedding: Part,
    ) -> None:
        self._settings, self._plan = settings, request.plan
        self._num_steps = len(settings.federation.steps_of(request.round))
        self._devices = {each.name: each for each in devices.known(described)}
        self._samples = settings.batch_size / request.plan.num_micro_batches
        self._described, self._all = described, devices
        self._rows = math.ceil(self._samples)  # of the largest micro-batch
        self._enough = block_cost(settings).segment_needs(1, self._rows)  # bytes for one block
        self._embedding, self._timer = embedding, PhaseTimer()
        dtype = getattr(torch, settings.pipeline.dtype)
        forms = block_forms(spec, range(spec.num_blocks), settings.optimizer, dtype)
        self._replica = replica = Replica(
            forms, starting_with(start.weights, start.state), start.fixed
        )

        cluster = Cluster(
            devices=devices.roster,
            channels=devices.channels,
            replan=self._replan,
            hung_s=self._hung_s,
            relay=devices.relay,
            needed_bytes=self._needed_bytes,
        )
        common = RoundDescription(
            version=__version__,
            unit=request.plan.unit,
            round=request.round,
            seed=settings.seed,
            model=describe(spec),
            recompute=settings.pipeline.recompute is True,
            wire_dtype=settings.pipeline.wire_dtype,
            dtype=settings.pipeline.dtype,
            optimizer=settings.optimizer,
            replicate_every=self._interval(forms, spec.dim),
            first_trained=first_trained(
                embedding.trains, (bool(f.trained) for f in forms.values())
            ),
            frozen=start.fixed.digests,
        )
        self.segments = RemoteSegments(request.plan, cluster, common, spec, replica, self._timer)

    def pipeline(self, head: PipelineHead) -> Pipeline:
        """Build the pipeline of the embedding, the devices' segments and the head."""
        m = self._plan.num_micro_batches
        head.on_answer(self.segments.arrived)
        return Pipeline(m, self._embedding, self.segments, head, self._timer)

    def keep_relay(self) -> None:
        """Relay hops in later rounds, too, if a device could not dial another one."""
        self._all.relay = self.segments.relays

    def figures(self) -> DeviceFigures:
        """Return the devices' measurements and events in the round, and update the law."""
        segments = self.segments
        reports, times = tuple(segments.measured()), segments.step_times()
        events = (*self._all.news, *self._planned(), *segments.events)
        if times is not None:
            hosts, lost = segments.hosts, segments.lost
            self._all.learn(segments.plan, times, hosts, self._described, lost)
        self._all.news.clear()
        if not segments.lost:
            steps_s = self._timer.seconds[PIPELINE]
            self._all.sending = {
                each.name: Sending(each.sent_bytes / self._num_steps, each.send_s / steps_s)
                for each in reports
            }
            step_s, copies = steps_s / self._num_steps, self._replica.num_copies
            self._all.storing = self._replica.busy_s / copies / step_s if copies else 0.0
        return DeviceFigures(
            reports=reports,
            events=tuple(map(self._all.redacted, events)),
            traces=tuple(segments.traces()),
            alive=frozenset(each.name for each in reports) - set(segments.lost),
        )

    def _planned(self) -> Iterator[str]:
        """Yield messages on blocks that measured times have moved since the last plan, and once if
        this process alone would be faster."""
        law, plan, size = self._all.law, self._plan, self._settings.batch_size
        if law is None or not law.blocks.keys() <= self._devices.keys() - self._all.absent.keys():
            return
        stages, new_law = held_stages(plan), law.with_micro_batches(plan.num_micro_batches)
        works = works_of(new_law, stages, plan.in_modes(self._devices), size)
        if not self._all.advised and (text := without_devices(new_law, works, plan.schedule)):
            self._all.advised = True
            yield text
        if stages != law.stages:
            old_s = step_s(law, works_of(law, law.stages, self._devices, size), plan.schedule)
            new_s = new_law.expected_s(stages, step_s(new_law, works, plan.schedule), plan.schedule)
            yield from moved_blocks(law, stages, old_s, new_s, self._settings.framework.partition)

    def _needed_bytes(
        self, blocks: int, in_flight: int, part: float, gradients: int, recompute: bool
    ) -> float:
        """Return the planned bytes of a segment, see ``Cluster``."""
        rows = part * self._rows
        kept = min(1.0, in_flight * rows / self._settings.batch_size)
        return block_cost(self._settings, recompute).segment_needs(blocks, rows, kept, gradients)

    def _interval(self, forms: Mapping[str, BlockForm], dim: int) -> int:
        """Return the steps between two copies of the blocks in this round."""
        settings, every = self._settings, self._settings.pipeline.replicate_every
        if every != "auto":
            return every
        sent = sent_share(dim, settings.pipeline.wire_dtype)
        hop = Sending(settings.batch_size * sent * block_cost(settings).activation_bits / 8)
        copies = copied_bytes(self._plan, max(each.copy_bytes for each in forms.values()))
        sending = {name: self._all.sending.get(name, hop) for name in copies}
        return copy_interval(copies, sending, self._all.storing)

    def _replan(
        self, lost: Mapping[str, str], refused: Mapping[str, tuple[int, str]]
    ) -> ClusterPlan:
        """Return the fastest plan over the remaining devices within their limits, with the same
        micro-batches. Raises ``RoundFailedError`` if they cannot hold the model."""
        settings = self._settings
        for name, (blocks, cause) in refused.items():
            least = f"; {self._enough:,.0f} are enough for 1 block" if blocks > 1 else ""
            self._all.limit(name, blocks - 1, f"{cause}{least}")
        missing = {**self._all.absent, **lost}
        known = (self._all.limited(e) for name, e in self._devices.items() if name not in missing)
        left = [each for each in known if each.max_blocks != 0]
        if not left:
            raise RoundFailedError(f"lost all its devices: {self._all.causes(lost)}")
        try:
            plan, news = plan_after_loss(
                self._plan,
                {*missing, *refused},
                left,
                batch_size=settings.batch_size,
                most_segments=settings.pipeline.num_segments,
                may_share=settings.tree["strategy"].get("sharing") == "auto",
            )
        except InfeasibleRoundError as error:
            raise RoundFailedError(f"because of {self._all.causes(lost)}: {error}") from error
        if news is not None:
            self._all.news.append(news)
        return plan

    def _hung_s(self, plan: ClusterPlan) -> float:
        """Return an upper bound of the seconds that an action takes on a healthy device."""
        held = {name: each.span.blocks for each in plan.segments for name in each.devices}
        planned = (self._devices[name].time.compute(n, self._samples) for name, n in held.items())
        return max(_HUNG_S, _HUNG_CHUNKS * max(planned, default=0.0))
