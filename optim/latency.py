"""Latency of a partition, and the block caps that memory and energy set."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import InfeasibleRoundError
from collapipe.state import ROUNDING, DeviceProfile, EnergyBudget
from optim.problem import ClusterProblem, Floats, Ints, Partition


def partition_of(
    problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int
) -> Partition:
    """Return the partition with its times under the problem's latency law.

    With the sum of all stages Σ and the slowest stage M of a micro-batch of b/m samples, a batch
    takes Σ + (m - 1)·M. With compute C and hop H of a chunk on each of the S devices that hold
    blocks:

    - ``bound`` (eq. 15, without subtracting a hop): each of the S stages takes max (C + H).
    - ``flow_shop``: C + H is one stage; a device computes, sends, then continues.
    - ``overlap``: C and H are separate stages; a device sends while it computes.

    The head and the transfer of gradients to the unit are further stages.
    """
    size = problem.batch_size / num_micro_batches
    held = [(d.time, count) for d, count in zip(problem.devices, blocks, strict=True) if count]
    computes = [law.compute(count, size) for law, count in held]
    hops = [law.hop(size) for law, _ in held]
    chunks = [compute + hop for compute, hop in zip(computes, hops, strict=True)]
    slowest = max(*computes, *hops) if problem.latency == "overlap" else max(chunks)
    encoder = len(held) * slowest if problem.latency == "bound" else sum(chunks)
    later_s = problem.head_s / num_micro_batches, problem.gradient_s / num_micro_batches
    slowest = max(slowest, *later_s)
    latency = encoder + sum(later_s) + (num_micro_batches - 1) * slowest
    return Partition(tuple(blocks), num_micro_batches, latency, slowest)


def streamed_s(
    latency_s: Floats | float,
    slowest_s: Floats | float,
    num_micro_batches: Ints | Floats | int,
    activation_s: Floats | float,
) -> Floats:
    """Return a batch's seconds if activations take ``activation_s`` on the uplink, broadcast.

    The uplink is one more stage with A = activation_s/m per micro-batch: Σ + A + (m - 1)·max(M, A)
    = latency + A + (m - 1)·max(A - M, 0). With M = 0 the result is latency + m·A.
    """
    each = np.asarray(activation_s / num_micro_batches)
    later = np.maximum(each - slowest_s, 0.0)
    return np.asarray(latency_s + each + (num_micro_batches - 1) * later)


def batch_s(partition: Partition, activation_s: float) -> float:
    """Return the seconds of a batch of this partition by ``streamed_s``."""
    times = partition.latency_s, partition.slowest_s, partition.num_micro_batches
    return float(streamed_s(*times, activation_s))


@lru_cache(maxsize=32)  # a solver's parts each ask for those of the same problem
def block_caps(problem: ClusterProblem) -> Ints:
    """Return the most blocks of each device, [M, K], 0 … L; row m - 1 is for m micro-batches.

    Rows below the problem's least m are 0. The memory cap (C7) depends on m through
    ``ClusterProblem.kept``, the energy cap (C9') through b̂.
    """
    sizes, caps = micro_batch_sizes(problem), list[Ints]()
    # those of memory depend on the whole rows of a micro-batch alone
    _, first, same = np.unique(np.ceil(sizes), return_index=True, return_inverse=True)
    for device in problem.devices:
        own = np.array([memory_cap(problem, device, m + 1) for m in first.tolist()])[same]
        if (budget := device.energy) is not None:
            own = np.minimum(own, _energy_caps(budget, sizes, problem)).astype(np.int64)
        own[: problem.min_micro_batches - 1] = 0
        caps.append(own)
    found = np.stack(caps, axis=1)
    found.setflags(write=False)
    return found


def memory_cap(problem: ClusterProblem, device: DeviceProfile, num_micro_batches: int) -> int:
    """Return how many blocks fit the device's memory (C7)."""
    size = problem.batch_size / num_micro_batches
    return device.memory_cap(size, problem.num_blocks, problem.kept(num_micro_batches))


def micro_batch_sizes(problem: ClusterProblem) -> Floats:
    """Return b̂ = b/m for m = 1 … M, [M]."""
    return problem.batch_size / np.arange(1, problem.max_micro_batches + 1)


def _energy_caps(budget: EnergyBudget, sizes: Floats, problem: ClusterProblem) -> Floats:
    law = budget.law
    times = problem.batch_size / sizes if budget.scope == "batch" else 1.0
    limit = budget.limit_j * (1 + ROUNDING)
    left = limit / times - (law.w * sizes + law.ell)
    return np.clip(fitting(left, law.u * sizes + law.v), 0, problem.num_blocks)


def fitting(left: NDArray[Any], each: NDArray[Any]) -> Floats:
    """Return how often ``each`` fits into ``left``, up to rounding, broadcast."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(each > 0, left / each, np.where(left >= 0, math.inf, 0.0))
    return np.floor(count * (1 + ROUNDING))


def fitting_micro_batches(problem: ClusterProblem) -> list[int]:
    """Return each m for which the devices together can hold the model.

    Raises ``InfeasibleRoundError`` if no m fits.
    """
    fitting = (block_caps(problem).sum(axis=1) >= problem.num_blocks).nonzero()[0] + 1
    if not fitting.size:
        raise model_too_large(problem)
    return [int(m) for m in fitting]


def require_within_caps(
    solver: str, problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int
) -> None:
    """Raise ``InfeasibleRoundError`` naming the first device with too many blocks."""
    caps = block_caps(problem)[num_micro_batches - 1].tolist()
    for device, held, cap in zip(problem.devices, blocks, caps, strict=True):
        if held > cap:
            by_energy = _energy_binds(problem, num_micro_batches, device, cap)
            raise InfeasibleRoundError(
                f"solver {solver}: device {device.name} would hold {held} blocks with "
                f"{num_micro_batches} micro-batches, at most {cap} fit its "
                f"{'energy budget' if by_energy else _limit(device, cap)}; raise it, lower "
                "model.num_blocks, or let the exact solver split"
            )


def model_too_large(
    problem: ClusterProblem,
    limits: Sequence[str] = (),
    most: tuple[int, Sequence[int]] | None = None,
) -> InfeasibleRoundError:
    """Return the error for a cluster that cannot hold L blocks, with each cap and a remedy.

    ``limits`` name, for each device, the limit other than energy; default: ``max_blocks`` or
    memory. ``most`` are the m with the most blocks, and each device's; default: if each counts as
    the first of all.
    """
    by_m = block_caps(problem)
    row = int(by_m.sum(axis=1).argmax()) if by_m.any() else len(by_m) - 1  # m of the least memory
    m, caps = most or (row + 1, by_m[row].tolist())
    held, bound = sum(caps), list[str]()
    limits = limits or [*map(_limit, problem.devices, caps)]
    for device, cap, limit in zip(problem.devices, caps, limits, strict=True):
        binds = limit
        if device.energy and _energy_binds(problem, m, device, cap):
            blocks = f"{cap + 1} blocks take" if cap else "1 block takes"
            joules = _joules(device.energy, cap + 1, m, problem)
            binds = f"energy_j {device.energy.limit_j:g} where {blocks} {joules} J"
        bound.append(f"{device.name}: {cap} by {binds}")
    ways = [f"raise {_remedy(problem, caps, m, limits)}"]
    if largest := max(caps):
        more = math.ceil((problem.num_blocks - held) / largest)
        ways.append(f"add {more} more like {problem.devices[caps.index(largest)].name}")
    ways += [f"lower model.num_blocks to {held}"] * (held > 0)
    ways += ["train fewer weights (LoRA)"] * ("memory" in limits)
    return InfeasibleRoundError(
        f"the devices hold at most {held} of {problem.num_blocks} blocks in {m} "
        f"micro-batch{'es' if m > 1 else ''} ({', '.join(bound)}); {', or '.join(ways)}"
    )


def _remedy(problem: ClusterProblem, caps: Sequence[int], m: int, limits: Sequence[str]) -> str:
    """Return the remedy: more energy as far as memory allows, then more memory."""
    raises, missing = [], problem.num_blocks - sum(caps)
    for device, cap in zip(problem.devices, caps, strict=True):
        more = min(memory_cap(problem, device, m) - cap, missing)
        if device.energy and more > 0:
            joules = _joules(device.energy, cap + more, m, problem)
            raises.append(f"{device.name}'s energy_j to {joules}")
            missing -= more
    if missing:
        named = list(zip(problem.devices, caps, limits, strict=True))
        full = [each for each in named if not _energy_binds(problem, m, *each[:2])] or named
        keys = dict.fromkeys(_names(device, limit) for device, _, limit in full)
        more_blocks = "1 block" if missing == 1 else f"{missing} blocks in all"
        raises.append(f"{' or '.join(keys)} by {more_blocks}")
    return " and ".join(raises)


def _limit(device: DeviceProfile, cap: int) -> str:
    """Return the limit other than energy of a device that can hold at most ``cap`` blocks."""
    return device.limited_by if device.max_blocks == cap else "memory"


def _names(device: DeviceProfile, limit: str) -> str:
    """Return the device's options of a limit, without their values. Profiles may have memory that
    is described by other options."""
    options = " ".join(each for each in limit.split() if "_" in each or each == "and")
    return f"{device.name}'s {options}" if options else limit


def _energy_binds(problem: ClusterProblem, m: int, device: DeviceProfile, cap: int) -> bool:
    return device.energy is not None and cap < memory_cap(problem, device, m)


def _joules(budget: EnergyBudget, blocks: int, m: int, problem: ClusterProblem) -> str:
    spent = budget.law.chunk(blocks, problem.batch_size / m)
    return round_up(spent * m if budget.scope == "batch" else spent)


def round_up(value: float) -> str:
    """Round up to three digits, so that a budget of the printed figure is not too small."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step * (1 - ROUNDING)) * step:.3g}"
