"""Similar devices as one kind, so that all plans of a large cluster can be compared.

If every device is as good as the best of its kind, no plan of the cluster is faster than the
fastest that is found: a lower bound. If every device is as bad as the worst, each one is a plan.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from collapipe.state import DeviceProfile
from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats
from optim.sharing.law import row_caps
from optim.sharing.states import kinds_of, num_pairs

Pick = Callable[[Sequence[Any]], Any]

_LIMITS = "limit_bytes", "limit_j", "max_blocks"
_LEAST_S = 1e-9  # seconds: shorter ones count as equal


def similar_kinds(problem: ClusterProblem, most_pairs: int) -> list[list[int]] | None:
    """Return kinds of similar devices, by index, with at most ``most_pairs`` pairs of a set and a
    group; None if devices have limits of too many forms. The kinds that differ least are merged
    first, by the sum of the logarithms of the ratios of what their devices take and hold."""
    kinds = kinds_of(problem.devices)
    first = [own[0] for own in kinds]
    low = _features(problem)[first]
    high = low.copy()
    forms = [_form(problem.devices[k]) for k in first]
    apart = np.array([[a is b or a != b for b in forms] for a in forms])
    while num_pairs(tuple(map(len, kinds))) > most_pairs:
        ratios = np.maximum(high[:, None], high) - np.minimum(low[:, None], low)
        differ = np.where(apart, np.inf, ratios.sum(axis=2))
        a, b = sorted(map(int, np.unravel_index(int(differ.argmin()), differ.shape)))
        if math.isinf(differ[a, b]):
            return None
        kinds[a] += kinds.pop(b)
        low[a], high[a] = np.minimum(low[a], low[b]), np.maximum(high[a], high[b])
        low, high, apart = (np.delete(each, b, axis=0) for each in (low, high, apart))
        apart = np.delete(apart, b, axis=1)
    return kinds


def as_kinds(problem: ClusterProblem, kinds: Iterable[Sequence[int]], best: bool) -> ClusterProblem:
    """Return the problem in which each device is as good as the ``best`` of its kind in every
    respect, or as bad as the worst."""
    devices = list(problem.devices)
    for own in kinds:
        like = _merged([devices[k] for k in own], *((min, max) if best else (max, min)))
        for k in own:
            devices[k] = replace(like, name=devices[k].name)
    return replace(problem, devices=tuple(devices))


def _features(problem: ClusterProblem) -> Floats:
    """Return logarithms of what each device takes and holds, [K, 5]."""
    blocks, b = block_caps(problem).sum(axis=0), problem.batch_size
    laws = [(each.time, each.sharing.sync_s if each.sharing else 0.0) for each in problem.devices]
    taken = [(time.compute(1, b), time.hop(b), sync_s) for time, sync_s in laws]
    held = [row_caps(problem, each)[0].sum() for each in problem.devices]
    return np.column_stack([np.log(np.maximum(taken, _LEAST_S)), np.log1p(blocks), np.log1p(held)])


def _form(device: DeviceProfile) -> tuple[object, ...]:
    """Return what devices of a kind have in common: which limits they have, and the memory that
    rows and blocks take."""
    law, energy = device.sharing, device.energy
    limits = device.memory, law.memory if law else None
    memory = (each and replace(each, limit_bytes=0.0) for each in limits)
    counts = device.max_blocks is None, law and law.max_blocks is None  # or no law
    return energy and energy.scope, *counts, *memory


def _merged(values: Sequence[Any], pick: Pick, pick_limit: Pick) -> Any:
    """Return the picked value of each field of profiles of one form."""
    if not is_dataclass(values[0]) or isinstance(values[0], type):
        return pick(values) if isinstance(values[0], int | float) else values[0]
    own = {
        each.name: (pick_limit, pick) if each.name in _LIMITS else (pick, pick_limit)
        for each in fields(values[0])
    }
    found = {name: _merged([getattr(v, name) for v in values], *how) for name, how in own.items()}
    return replace(values[0], **found)
