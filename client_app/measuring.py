"""The laws of an inventory's devices, measured with micro-batches of a model."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

from client_app.survey import Box, ask_all, fit_hop, time_hop
from client_app.timing import chunk_seconds
from collapipe.cancellation import cancellable
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CollaPipeError, LinkError, StageError
from collapipe.formatting import counted
from collapipe.inventory.schema import InventorySection
from collapipe.models.part import prefixed
from collapipe.models.split import ModelSpec, block_name
from collapipe.state import AffineLaw, BlockCost
from collapipe.tensors import Tensors
from collapipe.wire.dialing import Dialer
from collapipe.wire.inquiries import PROBE_FRAME_BYTES

_PARTS = 4  # of a batch: the largest micro-batch is one of them
_BITS = 8  # of a byte
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """What is sent through devices, ``repeats`` times; ``cost`` is a block's for a whole batch."""

    spec: ModelSpec
    cost: BlockCost
    tokens: int
    batch_size: int
    repeats: int

    @property
    def samples(self) -> tuple[int, int]:
        """Of the smaller and the larger micro-batch."""
        return 1, max(2, self.batch_size // _PARTS)


@dataclass(frozen=True, slots=True)
class Measured:
    """A device's law with the relative errors of both fits, or why there is none."""

    box: Box
    law: AffineLaw | None = None
    compute_error: float = 0.0
    hop_error: float = 0.0
    fault: str | None = None


def measure(section: InventorySection, dialer: Dialer, trial: Trial, tell: Tell) -> list[Measured]:
    """The law of each device, in the file's order; ``tell`` gets a line now and then.

    Devices at one host's address compute one after another. Hops are timed after that, one by one.
    """
    clusters = ask_all(section, dialer)
    chunks = _all_chunks([box for boxes in clusters for box in boxes], dialer, trial, tell)
    found = list[Measured]()
    for boxes in clusters:
        for box, target in zip(boxes, (*boxes[1:], None), strict=True):
            chunk = chunks[box.cluster, box.device.name]
            if isinstance(chunk, CollaPipeError):
                found.append(Measured(box, fault=str(chunk)))
                continue
            way = f"hop to {target.device.name if target else 'the control unit'}"
            tell(f"{box.device.name}: {way}")
            try:
                found.append(_measured(box, target, chunk, dialer, trial))
            except CollaPipeError as error:
                found.append(Measured(box, fault=f"{box.device.name}: {way}: {error}"))
    return found


def _all_chunks(
    boxes: Sequence[Box], dialer: Dialer, trial: Trial, tell: Tell
) -> dict[tuple[str, str], Fit | CollaPipeError]:
    """The fit of each box, or why there is none, by its cluster's name and its own."""
    hosts: defaultdict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        hosts[box.neighbour.address.rpartition(":")[0]].append(box)
    weights = _fresh_weights(trial.spec)
    found: dict[tuple[str, str], Fit | CollaPipeError] = {}

    def work(alike: Sequence[Box]) -> None:
        for box in alike:
            try:
                found[box.cluster, box.device.name] = _chunk(box, dialer, trial, weights, tell)
            except CollaPipeError as error:
                found[box.cluster, box.device.name] = error

    with cancellable() as scope, ThreadPoolExecutor(len(hosts)) as pool:
        try:
            for done in [pool.submit(copy_context().run, work, each) for each in hosts.values()]:
                done.result()
        except KeyboardInterrupt:
            scope.cancel()
            raise
    return found


def _chunk(box: Box, dialer: Dialer, trial: Trial, weights: Tensors, tell: Tell) -> Fit:
    """u and v. Raises ``CollaPipeError`` where the device does not tell."""
    _check_free(box)
    points, taken = list[tuple[float, float]](), list[float]()
    for blocks in _numbers_of_blocks(box, trial):
        tell(f"{box.device.name}: {counted(blocks, 'block')}")
        points += [(blocks * size, blocks) for size in trial.samples]
        taken += chunk_seconds(
            *(box.neighbour, dialer, trial.spec, weights),
            *(blocks, trial.samples, trial.tokens, trial.repeats),
        )
    found = fit(points, taken)
    if not found.each:
        least, most = trial.samples
        raise StageError(
            box.device.name,
            f"{most} samples took no longer than {least}; raise --repeats, or batch_size",
        )
    return found


def _measured(box: Box, target: Box | None, chunk: Fit, dialer: Dialer, trial: Trial) -> Measured:
    """The law of a device whose hop leads to ``target``. Raises ``CollaPipeError``."""
    if target is not None:
        _check_free(target)
    sample = int(trial.cost.activation_bits / _BITS)
    sizes = {1, *(min(sample * size, PROBE_FRAME_BYTES) for size in trial.samples)}
    each, fixed, error = fit_hop(time_hop(box, target, sorted(sizes), trial.repeats, dialer))
    both_ways = (trial.cost.activation_bits + trial.cost.gradient_bits) / 2 / _BITS
    law = AffineLaw(chunk.each, chunk.fixed, each * both_ways, fixed)
    return Measured(box, law, chunk.error, error)


def _check_free(box: Box) -> None:
    """Raise ``CollaPipeError`` where the box cannot be measured now."""
    if box.fault or box.status is None:
        raise LinkError(str(box.fault))
    if box.status.busy:
        raise StageError(box.device.name, "works for a control unit; measure later")


def _numbers_of_blocks(box: Box, trial: Trial) -> tuple[int, ...]:
    """One, and two where the device can hold them."""
    held = min(trial.spec.num_blocks, box.device.max_blocks or trial.spec.num_blocks)
    if box.status is not None:
        held = min(held, int(box.status.memory_bytes // trial.cost.block_bytes))
    return (1, 2) if held >= 2 else (1,)


def _fresh_weights(spec: ModelSpec) -> Tensors:
    """Of the first two blocks."""
    weights: Tensors = {}
    for index in range(min(2, spec.num_blocks)):
        weights |= prefixed(block_name(index), spec.build_block(index).state_dict())
    return weights
