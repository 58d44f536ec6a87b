"""Laws of a step, made up."""

from collections.abc import Collection
from typing import Any

from collapipe.step_law import DeviceTimes, StepLaw

HOST = "here"


def law_of(
    names: Collection[str], *, m: int = 4, cores: int = 64, apart: bool = False, **values: Any
) -> StepLaw:
    """Devices on the control unit's machine, or each on one of its own, which do nothing but
    compute unless ``values`` say otherwise."""
    hosts = {name: name if apart else HOST for name in names}
    times = dict.fromkeys(
        ("embedding_forward_s", "embedding_backward_s", "submit_s", "send_s", "head_s"), 0.0
    )
    nothing = {**times, "head_pace_s": 0.0, "overhead_s": 0.0, "blocks": {}, "present": (*names,)}
    send_s = float(values.get("send_s", 0.0))
    return StepLaw(
        num_micro_batches=m,
        devices={name: DeviceTimes(1 / 3, send_s, host) for name, host in hosts.items()},
        host=HOST,
        cores=dict.fromkeys([HOST, *hosts.values()], cores),
        **{**nothing, **values},
    )
