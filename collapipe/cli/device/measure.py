"""``collapipe device measure``: measure laws of an inventory's devices and links; write them."""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from shlex import quote
from statistics import quantiles

from collapipe import config
from collapipe.cli.device.hop_times import fit_hop
from collapipe.cli.device.law_table import Measured, show
from collapipe.cli.device.survey import (
    Hop,
    SurveyedDevice,
    ask_all,
    dialer_of,
    time_hops,
)
from collapipe.cli.device.trial_round import Trial, chunk_seconds
from collapipe.cli.device.trial_run import least_step_s, measured_steps, steps_of
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CollaPipeError, ConfigError, LinkError, StageError, printable
from collapipe.formatting import amount, counted
from collapipe.inventory.measured_step import step_file, write_steps
from collapipe.inventory.model import TOKENS, read_spec
from collapipe.inventory.rewriting import Key, check_editable, write_laws
from collapipe.inventory.schema import InventorySection, LinkSection
from collapipe.inventory.yaml_file import Document, load
from collapipe.models.cost import measure_cost
from collapipe.models.split import ModelSpec
from collapipe.process.cancellation import cancellable
from collapipe.state import MOST, AffineLaw
from collapipe.wire.streams.channels import Dialer

_BITS = 8  # per byte
# Passes over a host's devices, because a machine's load changes within seconds: the fewest, the
# most, and the seconds for each device after which no further one begins.
_FEWEST, _MOST, _MOST_S = 3, 10, 10.0
Times = defaultdict[tuple[int, int], list[float]]  # seconds by blocks and samples
_NO_CHUNK = Fit(0.0, 0.0, 0.0)  # of a link
_LEAST_BYTE_S = 2 * _BITS / MOST  # of a link, whose rate in the file is finite


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures devices by a ``trial``."""

    dialer: Dialer
    trial: Trial

    def laws(self, section: InventorySection) -> list[Measured]:
        """Measure the law of each device and link. Returns them in the file's order.

        Devices at the same host compute one after another. Hops are timed afterwards, cluster by
        cluster.
        """
        clusters = ask_all(section, self.dialer)
        chunks = iter(self._chunks([device for devices in clusters for device in devices]))
        sample = int(self.trial.cost.activation_bits / _BITS)
        sizes = [1, *(sample * each for each in self.trial.samples)]
        found, repeats = list[Measured](), _FEWEST * self.trial.repeats
        for devices, cluster in zip(clusters, section.clusters, strict=True):
            _report(f"{cluster.name}: hops")
            runs = _without_links(devices, cluster.links)
            ways = (time_hops(each, self.dialer, sizes, repeats)[1:] for each in runs)
            keys = ((cluster.name, each.name) for each in devices)
            found += map(self._measured, keys, chain.from_iterable(ways), chunks)
            own = {each.name: each for each in devices}
            for link in cluster.links:
                pair = [own[name] for name in link.between]
                way = time_hops(pair, self.dialer, sizes, repeats)[1]
                found.append(self._measured((cluster.name, *link.between), way, _NO_CHUNK))
        return found

    def _chunks(self, devices: Sequence[SurveyedDevice]) -> list[Fit | CollaPipeError]:
        """Return each device's fit, or the error that prevented it."""
        hosts: defaultdict[str, list[int]] = defaultdict(list)
        for place, device in enumerate(devices):
            hosts[device.address.address.rpartition(":")[0]].append(place)
        times: list[Times] = [defaultdict(list) for _ in devices]
        faults = dict[int, CollaPipeError]()

        def work(places: Sequence[int]) -> None:
            began, limit_s = time.monotonic(), _MOST_S * len(places)
            for number in range(_MOST):
                if number >= _FEWEST and time.monotonic() - began > limit_s:
                    return
                for place in places:
                    _report(f"{devices[place].name}: pass {number + 1}")
                    try:
                        if place not in faults:
                            self._time(devices[place], times[place])
                    except CollaPipeError as error:
                        faults[place] = error

        with cancellable() as scope, ThreadPoolExecutor(len(hosts)) as pool:
            try:
                for done in [
                    pool.submit(copy_context().run, work, each) for each in hosts.values()
                ]:
                    done.result()
            except KeyboardInterrupt:
                scope.cancel()
                raise
        return [faults.get(n) or self._fit(each, times[n]) for n, each in enumerate(devices)]

    def _time(self, device: SurveyedDevice, times: Times) -> None:
        """Add the times of one pass. Raises ``CollaPipeError`` if the device cannot compute it."""
        if device.error or device.status is None:
            raise LinkError(str(device.error))
        if device.status.busy:
            raise StageError(device.name, "is busy with a control unit; measure later")
        room = int(device.status.memory_bytes // self.trial.cost.block_bytes)
        most = min(self.trial.spec.num_blocks, device.device.max_blocks or 2, room)
        for blocks in (1, 2) if most >= 2 else (1,):
            taken = chunk_seconds(device.address, self.dialer, self.trial, blocks)
            for size, each in zip(self.trial.samples, taken, strict=True):
                times[blocks, size] += each

    def _fit(self, device: SurveyedDevice, times: Times) -> Fit | StageError:
        """Fit u and v to the lower quartiles of times: other work on the machine only adds time."""
        taken = [quantiles(each, n=4, method="inclusive")[0] for each in times.values()]
        if min(taken) <= 0:
            return StageError(device.name, "reports that blocks took 0 s; check its clock")
        found = fit([(blocks * size, blocks) for blocks, size in times], taken)
        if not found.each:
            least, most = self.trial.samples
            cause = f"{most} samples took no longer than {least}; raise --repeats, or batch_size"
            return StageError(device.name, cause)
        return found

    def _measured(self, key: Key, way: Hop, chunk: Fit | CollaPipeError) -> Measured:
        """Return the law of a device or link, whose hop to the next device is ``way``."""
        if isinstance(chunk, CollaPipeError):
            return Measured(key, fault=str(chunk))
        hop, cost = _fitted(way, 0.0 if chunk.each else _LEAST_BYTE_S), self.trial.cost
        name = " - ".join(key[1:])
        if isinstance(hop, str):
            return Measured(key, fault=f"{name}: hop to {way.target}: {hop}")
        sent_s = hop.each * cost.hop_bits / 2 / _BITS
        try:
            law = AffineLaw(u=chunk.each, v=chunk.fixed, w=sent_s, ell=hop.fixed)
        except ConfigError as error:
            return Measured(key, fault=f"{name}: measured times cannot be right: {error}")
        return Measured(key, law, chunk.error, hop.error)


def _fitted(way: Hop, least_byte_s: float) -> Fit | str:
    """Return a hop's fit with at least so many seconds per byte, or why there is none."""
    if not way.trips:
        unused = "is busy; measure later" if way.busy else f"{way.target} cannot be used"
        return way.error or unused
    sizes = [amount(each.num_bytes, "B") for each in way.trips]
    if len(sizes) < 2:
        return f"too slow for more than messages of {sizes[0]}"
    hop = fit_hop(way.trips)
    if hop.each < least_byte_s:
        return f"{sizes[-1]} took no longer than {sizes[0]}; raise --repeats, or batch_size"
    return hop


def _without_links(
    devices: Sequence[SurveyedDevice], links: Sequence[LinkSection]
) -> list[list[SurveyedDevice]]:
    """Cut a cluster's pipeline at links, so that devices' usual hops are timed: before a cut, those
    to the control unit."""
    pairs, runs = [{*each.between} for each in links], [[devices[0]]]
    for before, device in pairwise(devices):
        runs += [[]] if {before.name, device.name} in pairs else []
        runs[-1].append(device)
    return runs


def measure_devices(file: Path, overrides: Sequence[str], repeats: int, write: bool) -> int:
    """Measure and print each device's and link's law, and with ``write`` put them into the file.

    The options ``overrides`` of a run name the model; without them the file does. With both, a few
    short rounds measure the steps of that run, which are written beside the file. Returns 1 if a
    device or link could not be measured, else 0. Raises ``ConfigError`` for an invalid file, model,
    option or credentials.
    """
    document = load(file)
    section = document.parse(InventorySection)
    spec, tokens, batch_size = _model(document, section, overrides)
    cost = measure_cost(spec, tokens, batch_size)
    trial = Trial(spec, cost, tokens, batch_size, repeats)
    dialer = dialer_of(file, section)
    if write:  # raises an error now, not after minutes of measuring
        check_editable(file, cost)
    found = Measuring(dialer, trial).laws(section)
    show(found, cost, tokens, ", of {} and {}".format(*trial.samples))
    known = {each.key: each.law for each in found if each.law is not None}
    if write and known:
        write_laws(file, known, cost)
        if (earlier := step_file(file)).exists():
            earlier.unlink()
            print(f"removed     {earlier}: its times are relative to the earlier laws")
        planned = "" if overrides else f"; collapipe plan {quote(str(file))}"
        print(f"written     {counted(len(known), 'law')} to {file}{planned}")
    for fault in (each.fault for each in found if each.fault):
        print(f"error: {printable(fault)}; its figures stay as they are", file=sys.stderr)
    if len(known) < len(found):
        return 1
    if not (write and overrides):
        print("first round of a run: measure with its options and --write, to plan it as well")
        return 0
    _report("rounds of a trial run")
    step_s = max(
        least_step_s(spec.num_blocks * batch_size, [known[each.name, d.name] for d in each.devices])
        for each in section.clusters
    )
    options, steps = measured_steps(file, len(section.clusters), overrides, steps_of(step_s))
    print(f"written     steps to {write_steps(file, options, steps)}, to plan the first round")
    lacking = [each.name for each, step in zip(section.clusters, steps, strict=False) if not step]
    for name in lacking:
        print(f"error: {name}: its steps were not measured; see the run above", file=sys.stderr)
    return 1 if lacking else 0


def _model(
    document: Document, section: InventorySection, overrides: Sequence[str]
) -> tuple[ModelSpec, int, int]:
    """Return the model of a run, or without options the inventory's; the tokens of its samples, and
    the samples of a batch."""
    if overrides:
        settings = config.load_overrides(config.own_overrides(overrides))
        return settings.model, settings.task.max_length, settings.batch_size
    return read_spec(document, section), section.model.tokens or TOKENS, section.batch_size


def _report(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
