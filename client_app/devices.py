"""A control unit's real devices: their addresses, speeds, pipeline, and the plan after a loss."""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from client_app.cluster_state import block_cost
from client_app.copies import Sending, copied_bytes, copy_interval
from client_app.measured_law import (
    fitted_to_last,
    held_stages,
    known_profile,
    measured_law,
    updated,
    without_devices,
)
from collapipe import __version__
from collapipe.config import Settings
from collapipe.credentials.credentials import load
from collapipe.devices.kept_law import pack_law, unpack_law
from collapipe.errors import (
    ConfigError,
    InfeasibleRoundError,
    LinkError,
    RoundFailedError,
    one_line,
)
from collapipe.formatting import counted, seconds
from collapipe.inventory.cluster import DeviceCluster
from collapipe.models.description import describe
from collapipe.models.part import Part
from collapipe.models.split import ModelSpec
from collapipe.plan import ClusterPlan
from collapipe.process.allocator import return_large_blocks
from collapipe.process.host import Host, this_host
from collapipe.report import PIPELINE, DeviceReport, DeviceTrace
from collapipe.state import DeviceProfile
from collapipe.step_law import StepLaw
from collapipe.tensors import Tensors
from collapipe.wire import messages
from collapipe.wire.channels import Channels, Dialer, without_addresses
from collapipe.wire.compression import sent_share
from collapipe.wire.messages import TrainRequest
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolution
from optim.sharing.exact import shared_partition
from optim.sharing.law import partition_of_plan
from optim.step import in_flight, step_s, works_of
from optim.verified import is_possible, solve_verified
from pipeline.devices.block_form import BlockForm, block_forms
from pipeline.devices.control_unit.action_times import StepTimes
from pipeline.devices.control_unit.connection import Cluster, ask_status
from pipeline.devices.control_unit.replica import Replica, starting_with
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.messages import BRIEF, RoundDescription
from pipeline.engine import Pipeline
from pipeline.head import PipelineHead
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import first_trained

_log = logging.getLogger(__name__)
_HUNG_S, _HUNG_CHUNKS = 10.0, 20.0  # seconds, and planned chunk times, after which a device hangs
_MOST_PLANS = 1000  # that are compared after a loss


class Devices:
    """The real devices of unit ``unit``: which of them answer, and their measured speeds.

    The ``law`` of a step belongs to the current round or question; call ``recall`` to restore it
    before. It is None if nothing was measured.
    """

    def __init__(self, settings: Settings, cluster: DeviceCluster, unit: int) -> None:
        return_large_blocks()
        self.roster = {each.name: each for each in cluster.roster(unit)}
        own = cluster.credentials
        self._dialer = Dialer(load(own) if own else None)
        self.channels = Channels(self._dialer)  # open in all rounds
        weakref.finalize(self, self.channels.close)
        self._profile = settings.pipeline.profile is not False
        self._batch_size = settings.batch_size
        self.relay = settings.pipeline.relay  # becomes True if a device cannot dial another
        self.law: StepLaw | None = None
        self._labels = {this_host().name: ""}  # of machines in this process
        self.absent: Mapping[str, str] = {}  # device → cause, when devices were last contacted
        # as measured in the last round without a loss
        self.sending: dict[str, Sending] = {}
        self.storing = 0.0  # a copy's processor time on the control unit, in steps
        # device → most blocks for which it has memory, less than the inventory says
        self.most_blocks: dict[str, int] = {}
        self.news: list[str] = []  # lost and returned devices since the last report
        self.advised = False  # that this process alone is faster

    def recall(self, kept: Mapping[str, Tensors], first: Callable[[], StepLaw | None]) -> None:
        """Restore the law in groups that a unit ``kept``, without devices that left the cluster;
        ``first`` gives the law if none was kept. Raises ``WireError`` if they are malformed."""
        if self._profile:
            law = unpack_law(kept.get(messages.STEP_LAW, {})) or first()
            own = {n: each for n, each in law.devices.items() if n in self.roster} if law else {}
            self.law = law and replace(law, devices=own)

    def kept(self) -> dict[str, Tensors]:
        """Return the groups of tensors with the measured times, for ``recall``."""
        return {messages.STEP_LAW: pack_law(self.law)}

    def known(self, profiles: Collection[DeviceProfile]) -> tuple[DeviceProfile, ...]:
        """Return the described devices with their measured speeds."""
        return tuple(known_profile(each, self.law, self._batch_size) for each in profiles)

    def present(
        self, profiles: Collection[DeviceProfile], alive: Collection[str] = ()
    ) -> tuple[DeviceProfile, ...]:
        """Return the devices with their measured speeds. Devices that do not answer, or have
        another version, can hold no block; devices that are ``alive`` are not contacted."""
        names = [each.name for each in profiles if each.name not in alive]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            faults = dict(zip(names, pool.map(self._fault, names), strict=True))
        before, self.absent = self.absent, {name: why for name, why in faults.items() if why}
        new = (f"planned without {n}: {w}" for n, w in self.absent.items() if n not in before)
        self.news += [*new, *(f"{n} answers again" for n in before if n not in self.absent)]
        if len(self.absent) == len(profiles):
            _log.warning("no device answers: %s", "; ".join(self.absent.values()))
        most = self.most_blocks | dict.fromkeys(self.absent, 0)
        return tuple(
            replace(each, max_blocks=most[each.name]) if each.name in most else each
            for each in self.known(profiles)
        )

    def _fault(self, name: str) -> str | None:
        """Return why a device cannot work for this unit; None if it can."""
        if fault := self._dialer.fault(name, self.roster[name].address):
            return fault
        try:
            return ask_status(self._dialer, self.roster[name], BRIEF).misfit(name, __version__)
        except LinkError as error:
            return str(error)

    def learn(
        self,
        plan: ClusterPlan,
        times: StepTimes,
        hosts: Mapping[str, Host],
        described: Collection[DeviceProfile],
        lost: Collection[str] = (),
    ) -> None:
        """Update the law from the ``times`` of a round with this ``plan`` on ``described`` devices.
        Impossible times are ignored."""
        if not self._profile:
            return
        before, missing = self.law, {*self.absent, *lost}
        left = plan.in_modes({each.name: each for each in described if each.name not in missing})
        try:
            machines = self._labelled(hosts)
            law = measured_law(plan, times, machines, left, self._batch_size, before)
            if before is not None:
                known = plan.in_modes({each.name: each for each in self.known(described)})
                of_m = before.with_micro_batches(plan.num_micro_batches)
                works = works_of(of_m, law.stages, known, self._batch_size)
                planned_s = step_s(of_m, works, plan.schedule)
                law = updated(before, law, planned_s=planned_s, step_s=times.step_s)
                known = {
                    name: known_profile(each, law, self._batch_size) for name, each in left.items()
                }
                law = fitted_to_last(law, known, self._batch_size, plan.schedule)
        except ConfigError as error:  # a device may send any times
            _log.warning("unit %d: times of the round are not used: %s", plan.unit, error)
            return
        self.law = law

    def _labelled(self, hosts: Mapping[str, Host]) -> dict[str | None, Host]:
        """Replace machines' names by labels, so that the server learns only which devices share
        one. None is the control unit.

        A machine keeps the label that one of its devices has in the law, which another process may
        have measured. Else the label is the name of a device.
        """
        known = {name: each.host for name, each in self.law.devices.items()} if self.law else {}
        labels = self._labels
        for name, host in sorted(hosts.items(), key=lambda each: each[0] not in known):
            if host.name not in labels:
                own = [known[name]] if name in known else []
                new = (n for n in (name, *self.roster) if n not in known.values())
                free = [n for n in (*own, *new) if n not in labels.values()]
                if not free:
                    self.law, self._labels = None, {this_host().name: ""}
                    raise ConfigError("too many machines were started again; rounds measure anew")
                labels[host.name] = free[0]
        found: dict[str | None, Host] = {
            name: replace(host, name=labels[host.name]) for name, host in hosts.items()
        }
        return found | {None: replace(this_host(), name="")}

    def redacted(self, text: str) -> str:
        """Remove addresses from a text on devices, and put it on one line, for the server."""
        return one_line(without_addresses(text, self.roster.values()))


@dataclass(frozen=True, slots=True)
class RoundStart:
    """The start of a round: trainable weights, the ``fixed`` ones of each part, the optimiser's
    state, and the digests of each part's ``frozen`` weights."""

    weights: Tensors
    fixed: Mapping[str, Tensors]
    state: Tensors
    frozen: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The devices' measurements in a round, a sentence for each event, and the names of the devices
    that are ``alive`` at its end."""

    reports: tuple[DeviceReport, ...]
    events: tuple[str, ...]
    traces: tuple[DeviceTrace, ...]
    alive: frozenset[str]


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
        samples = settings.batch_size / request.plan.num_micro_batches
        self._described, self._all = described, devices
        self._spec, self._embedding = spec, embedding
        self._timer = PhaseTimer()
        dtype = getattr(torch, settings.pipeline.dtype)
        forms = block_forms(spec, range(spec.num_blocks), settings.optimizer, dtype)
        self._replica = replica = Replica(
            forms, starting_with(start.weights, start.state), start.fixed
        )

        def needed(blocks: int, kept: float, part: float, gradients: int, recompute: bool) -> float:
            cost = block_cost(settings, recompute)
            return cost.segment_needs(blocks, samples, kept, part, gradients)

        cluster = Cluster(
            devices=devices.roster,
            channels=devices.channels,
            replan=self._replan,
            hung_s=self._hung_s,
            relay=devices.relay,
            needed_bytes=needed,
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
            replicate_every=self._interval(request.plan, forms),
            first_trained=first_trained(
                embedding.trains, (bool(f.trained) for f in forms.values())
            ),
            frozen=start.frozen,
        )
        self.segments = RemoteSegments(request.plan, cluster, common, spec, replica, self._timer)

    def pipeline(self, head: PipelineHead) -> Pipeline:
        """Build the pipeline of the embedding, the devices' segments and the head."""
        m = self._plan.num_micro_batches
        head.on_answer(self.segments.arrived)
        return Pipeline(m, self._embedding, self.segments, head, self._timer)

    def figures(self) -> DeviceFigures:
        """Return the devices' measurements and events in the round, and update the law."""
        segments = self.segments
        reports, times = tuple(segments.measured()), segments.step_times()
        events = (*self._all.news, *self._planned(), *segments.events)
        if times is not None:
            hosts, lost = segments.hosts, segments.lost
            self._all.learn(segments.plan, times, hosts, self._described, lost)
        self._all.news.clear()
        for name, blocks in segments.refused.items():
            self._all.most_blocks[name] = blocks - 1  # a plan gave it ``blocks``
            most = counted(blocks - 1, "block")
            self._all.news.append(
                f"{name} holds at most {most} from now on: it offers less than its memory_bytes"
            )
        if not segments.lost:
            steps_s = self._timer.seconds[PIPELINE]
            self._all.sending = {
                each.name: Sending(each.sent_bytes / self._num_steps, each.send_s / steps_s)
                for each in reports
            }
            step_s, copies = steps_s / self._num_steps, self._replica.num_copies
            self._all.storing = self._replica.busy_s / copies / step_s if copies else 0.0
        self._all.relay = segments.relays
        return DeviceFigures(
            reports=reports,
            events=tuple(map(self._all.redacted, events)),
            traces=tuple(segments.traces()),
            alive=frozenset(each.name for each in reports) - set(segments.lost),
        )

    def _planned(self) -> Iterator[str]:
        """Yield a message if the round's plan differs from the last one because of measured times,
        and once if this process alone would be faster than the plan."""
        law, plan = self._all.law, self._plan
        if law is None or not law.blocks.keys() <= self._devices.keys() - self._all.absent.keys():
            return
        stages, size = held_stages(plan), self._settings.batch_size
        new_law = law.with_micro_batches(plan.num_micro_batches)
        works = works_of(new_law, stages, plan.in_modes(self._devices), size)
        if not self._all.advised and (text := without_devices(new_law, works, plan.schedule)):
            self._all.advised = True
            yield text
        if stages != law.stages:
            old_works = works_of(law, law.stages, self._devices, size)
            old_s = step_s(law, old_works, plan.schedule)
            new_s = step_s(new_law, works, plan.schedule)
            new_s = new_law.expected_s(stages, new_s, plan.schedule)
            old, new = (" + ".join(map(str, each)) for each in (law.stages, stages))
            split = self._settings.framework.partition
            rule = f" by the rule of {split}" if split else ""
            yield (
                f"blocks are now {new} instead of {old}{rule}: measured times give "
                f"{seconds(new_s)} instead of {seconds(old_s)} a step"
            )
            had, has = law.blocks, {name for each in stages for name in each.devices}
            for name, times in law.devices.items():
                if name in had and name not in has:
                    yield (
                        f"{name} holds no block now; its blocks took {times.slowness:.3g} "
                        f"times as long as described (usual: {law.usual_slowness:.3g})"
                    )
                elif name in has and name not in had:
                    yield f"{name} holds blocks again"

    def _interval(self, plan: ClusterPlan, forms: Mapping[str, BlockForm]) -> int:
        """Return the steps between two copies of the blocks in this round."""
        every, cost = self._settings.pipeline.replicate_every, block_cost(self._settings)
        if every != "auto":
            return every
        sent = sent_share(self._spec.dim, self._settings.pipeline.wire_dtype)
        hop = Sending(self._settings.batch_size * sent * cost.activation_bits / 8)
        block = max(each.copy_bytes for each in forms.values())
        copies = copied_bytes(plan, block)
        sending = {name: self._all.sending.get(name, hop) for name in copies}
        return copy_interval(copies, sending, self._all.storing)

    def _replan(self, lost: Mapping[str, str]) -> ClusterPlan:
        """Return the fastest plan over the remaining devices, with the same micro-batches. Raises
        ``RoundFailedError`` if they cannot hold the model."""
        missing = {**self._all.absent, **lost}
        left = tuple(each for name, each in self._devices.items() if name not in missing)
        if not left:
            causes = ((name, self._all.redacted(cause)) for name, cause in missing.items())
            why = "; ".join(f"{name} ({cause})" for name, cause in causes)
            raise RoundFailedError(f"lost all its devices: {why}")
        if self._plan.shares and (taken_over := self._taken_over(missing, left)):
            return taken_over
        problem, without = self._problem(left), f"without {', '.join(sorted(missing))}"
        try:
            found = solve_verified(problem, exact_partition, np.random.default_rng(0))
        except InfeasibleRoundError as error:
            if (shared := self._shared(problem)) is None:
                raise RoundFailedError(f"{without}: {error}") from error
            found = shared
        most = self._settings.pipeline.num_segments or len(left)
        allowed = [each for each in found.front if each.num_segments <= most]
        best = min(allowed or [found.best], key=lambda each: each.latency_s)
        unit, m, schedule = self._plan.unit, self._plan.num_micro_batches, self._plan.schedule
        if self._plan.shares or best.shares:
            what = "shares" if self._plan.shares else "blocks without sharing them"
            self._all.news.append(
                f"{without} no devices can hold the {what}: blocks are planned anew, which changes "
                "the weights' last bits"
            )
        return ClusterPlan(unit, best.segments(left), m, schedule)

    def _shared(self, problem: ClusterProblem) -> ClusterSolution | None:
        """Return plans with shared stages; None if none fits, or the strategy allows none."""
        allowed = self._settings.tree["strategy"].get("sharing") == "auto"
        if not (allowed or self._plan.shares):
            return None
        try:
            return solve_verified(problem, shared_partition, np.random.default_rng(0))
        except InfeasibleRoundError:
            return None

    def _problem(self, devices: Sequence[DeviceProfile]) -> ClusterProblem:
        """Return the problem of these devices with the plan's micro-batches."""
        m = self._plan.num_micro_batches
        return ClusterProblem(
            devices=tuple(devices),
            num_blocks=self._spec.num_blocks,
            batch_size=self._settings.batch_size,
            max_micro_batches=m,
            latency="overlap",  # real devices send while they compute
            min_micro_batches=m,
            in_flight=in_flight(self._plan.schedule, len(devices)),
        )

    def _taken_over(
        self, missing: Mapping[str, str], left: Sequence[DeviceProfile]
    ) -> ClusterPlan | None:
        """Return the fastest plan with the same shares over the devices that are ``left``; None if
        none can hold them. After several losses not all plans are compared."""
        found = list[tuple[float, int, ClusterPlan]]()
        every = self._plan.without(missing, self._plan.unused([each.name for each in left]))
        for number, plan in enumerate(islice(every, _MOST_PLANS)):
            modes = plan.in_modes({each.name: each for each in left})
            problem = self._problem(list(modes.values())).sharing()
            problem = problem.unlimited() if plan.over_limits else problem
            point = partition_of_plan(problem, plan)
            if is_possible(problem, point):
                found.append((point.latency_s, number, plan))
        return min(found)[-1] if found else None

    def _hung_s(self, plan: ClusterPlan) -> float:
        """Return an upper bound of the seconds that an action takes on a healthy device."""
        samples = self._settings.batch_size / self._plan.num_micro_batches
        held = {name: each.span.blocks for each in plan.segments for name in each.devices}
        planned = (self._devices[name].time.compute(n, samples) for name, n in held.items())
        return max(_HUNG_S, _HUNG_CHUNKS * max(planned, default=0.0))
