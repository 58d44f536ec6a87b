"""Synthetic laws of step times."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from collapipe.state import AffineLaw, DeviceProfile
from collapipe.step_law import DeviceTimes, HeldStage, StepLaw
from optim.step import StageWork, works_of

HOST = "here"


def law_of(
    names: Collection[str], *, m: int = 4, cores: int = 64, apart: bool = False, **values: Any
) -> StepLaw:
    """Return a law for devices on the control unit's machine, or on separate machines if ``apart``.
    Devices only compute, unless ``values`` add other times."""
    hosts = {name: name if apart else HOST for name in names}
    times = dict.fromkeys(
        ("embedding_forward_s", "embedding_backward_s", "submit_s", "send_s", "head_s"), 0.0
    )
    defaults = {**times, "head_pace_s": 0.0, "overhead_s": 0.0, "present": (*names,)}
    stages = stages_of(values.pop("blocks", {}))
    send_s = float(values.get("send_s", 0.0))
    return StepLaw(
        num_micro_batches=m,
        devices={name: DeviceTimes(1 / 3, send_s, host) for name, host in hosts.items()},
        host=HOST,
        cores=dict.fromkeys([HOST, *hosts.values()], cores),
        **{**defaults, "stages": stages, **values},
    )


def stages_of(blocks: Mapping[str, int]) -> tuple[HeldStage, ...]:
    """Return stages of single devices with these blocks, in pipeline order."""
    return tuple(HeldStage((name,), count) for name, count in blocks.items())


def taking(seconds: Mapping[str, float]) -> dict[str, DeviceProfile]:
    """Return devices that need these seconds per block for a micro-batch of any size."""
    return {name: DeviceProfile(name, AffineLaw(0.0, s, 0.0, 0.0)) for name, s in seconds.items()}


def works_with(
    law: StepLaw, names: Sequence[str], block_s: Sequence[float], blocks: Sequence[int]
) -> list[StageWork]:
    """Return the work of stages of single devices."""
    stages = stages_of(dict(zip(names, blocks, strict=True)))
    return works_of(law, stages, taking(dict(zip(names, block_s, strict=True))), 8)
