"""Measure the time laws of an inventory's devices with micro-batches of a model."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

from collapipe.cancellation import cancellable
from collapipe.cli.device.survey import Hop, SurveyedDevice, ask_all, time_hops
from collapipe.cli.device.trial_round import Trial, chunk_seconds, fit_hop
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CollaPipeError, LinkError, StageError
from collapipe.formatting import counted
from collapipe.inventory.schema import InventorySection
from collapipe.models.part import prefixed
from collapipe.models.split import ModelSpec, block_name
from collapipe.state import AffineLaw
from collapipe.tensors import Tensors
from collapipe.wire.channels import Dialer

_BITS = 8  # per byte
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """A device's law with the relative errors of both fits, or the ``fault`` that prevented it."""

    device: SurveyedDevice
    law: AffineLaw | None = None
    compute_error: float = 0.0
    hop_error: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures devices by a ``trial``; ``tell`` is called with lines on the progress."""

    dialer: Dialer
    trial: Trial
    tell: Tell

    def laws(self, section: InventorySection) -> list[MeasuredDevice]:
        """Measure the law of each device. Returns them in the file's order.

        Devices at the same host compute one after another. Hops are timed afterwards, cluster by
        cluster.
        """
        clusters = ask_all(section, self.dialer)
        chunks = iter(self._chunks([device for devices in clusters for device in devices]))
        sample = int(self.trial.cost.activation_bits / _BITS)
        sizes = [1, *(sample * each for each in self.trial.samples)]
        found = list[MeasuredDevice]()
        for devices in clusters:
            self.tell(f"{devices[0].cluster}: hops")
            ways = time_hops(devices, self.dialer, sizes, self.trial.repeats)[1:]
            found += map(self._measured, devices, ways, chunks)
        return found

    def _chunks(self, devices: Sequence[SurveyedDevice]) -> list[Fit | CollaPipeError]:
        """Return each device's fit, or the error that prevented it."""
        hosts: defaultdict[str, list[int]] = defaultdict(list)
        for place, device in enumerate(devices):
            hosts[device.address.address.rpartition(":")[0]].append(place)
        weights = _fresh_weights(self.trial.spec)
        found: dict[int, Fit | CollaPipeError] = {}

        def work(places: Sequence[int]) -> None:
            for place in places:
                try:
                    found[place] = self._chunk(devices[place], weights)
                except CollaPipeError as error:
                    found[place] = error

        with cancellable() as scope, ThreadPoolExecutor(len(hosts)) as pool:
            try:
                for done in [
                    pool.submit(copy_context().run, work, each) for each in hosts.values()
                ]:
                    done.result()
            except KeyboardInterrupt:
                scope.cancel()
                raise
        return [found[place] for place in range(len(devices))]

    def _chunk(self, device: SurveyedDevice, weights: Tensors) -> Fit:
        """Measure u and v. Raises ``CollaPipeError`` if the device cannot be measured."""
        _check_free(device)
        samples = self.trial.samples
        points, taken = list[tuple[float, float]](), list[float]()
        for blocks in (1, 2) if self._holds_two(device) else (1,):
            self.tell(f"{device.name}: {counted(blocks, 'block')}")
            points += [(blocks * size, blocks) for size in samples]
            taken += chunk_seconds(device.address, self.dialer, self.trial, weights, blocks)
        found = fit(points, taken)
        if not found.each:
            raise StageError(
                device.name,
                f"{samples[1]} samples took no longer than {samples[0]}; raise --repeats, or "
                "batch_size",
            )
        return found

    def _holds_two(self, device: SurveyedDevice) -> bool:
        assert device.status is not None
        room = int(device.status.memory_bytes // self.trial.cost.block_bytes)
        return min(self.trial.spec.num_blocks, device.device.max_blocks or 2, room) >= 2

    def _measured(
        self, device: SurveyedDevice, way: Hop, chunk: Fit | CollaPipeError
    ) -> MeasuredDevice:
        """Return the law of a device, whose hop to the next one is ``way``."""
        if isinstance(chunk, CollaPipeError):
            return MeasuredDevice(device, fault=str(chunk))
        if not way.trips:
            cause = way.error or f"{way.target} cannot be used or is busy"
            return MeasuredDevice(device, fault=f"{device.name}: hop to {way.target}: {cause}")
        hop, cost = fit_hop(way.trips), self.trial.cost
        both_ways = (cost.activation_bits + cost.gradient_bits) / 2 / _BITS
        law = AffineLaw(chunk.each, chunk.fixed, hop.each * both_ways, hop.fixed)
        return MeasuredDevice(device, law, chunk.error, hop.error)


def _check_free(device: SurveyedDevice) -> None:
    """Raise ``CollaPipeError`` if the device cannot be reached or is busy."""
    if device.error or device.status is None:
        raise LinkError(str(device.error))
    if device.status.busy:
        raise StageError(device.name, "is busy with a control unit; measure later")


def _fresh_weights(spec: ModelSpec) -> Tensors:
    """Make random weights of the first two blocks."""
    weights: Tensors = {}
    for index in range(min(2, spec.num_blocks)):
        weights |= prefixed(block_name(index), spec.build_block(index).state_dict())
    return weights
