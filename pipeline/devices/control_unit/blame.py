"""Decide which device is to blame for an error, or for a step in which nothing moves."""

from collections.abc import Mapping

from collapipe.errors import StageError
from collapipe.plan import ClusterPlan
from pipeline.devices.control_unit.pairs import dialled_by
from pipeline.devices.hops import HopError, UndialledError
from pipeline.devices.messages import BEFORE, BEHIND, SHARE, Trouble, place_of
from pipeline.schedule import BACKWARD, Action, Schedule, ready


class UnreachedError(StageError):
    """The neighbour ``source`` cannot dial a device, although both are alive."""

    def __init__(self, device: str, cause: str, source: str) -> None:
        super().__init__(device, cause)
        self.source = source


def suspect(
    error: StageError | HopError, trouble: Trouble | None, plan: ClusterPlan, relay: bool
) -> str | None:
    """Return the neighbour that an error names; None if the device itself failed.

    A ``HopError`` is the control unit's, which is at both ends. ``trouble`` is what the device of a
    ``StageError`` has reported under this plan.
    """
    if isinstance(error, HopError):
        name = error.neighbour
        own = len(plan.segments) if name.startswith(BEFORE) else -1
    else:
        if trouble is None or trouble.neighbour is None or error.device not in plan.devices:
            return None
        name = trouble.neighbour
        dialled = {pair.name_of_second for pair in dialled_by(error.device, plan, relay)}
        if trouble.kind == UndialledError.__name__ and name not in dialled:
            return None  # else each such report would repeat the recovery without a loss
        (own,) = (k for k, each in enumerate(plan.segments) if error.device in each.devices)
    if (at := place_of(name)) is None:
        return None
    stage = own + {BEFORE: -1, SHARE: 0, BEHIND: 1}[at[0]]
    devices = plan.segments[stage].devices if 0 <= stage < len(plan.segments) else ()
    return devices[at[1]] if at[1] < len(devices) else None


def holds_up(plan: ClusterPlan, lists: Schedule, finished: Mapping[str, int]) -> str | None:
    """Return the first device that has the input of its next action, None if there is none.

    ``lists`` are the actions of each segment in the current step, and ``finished`` how many of them
    each device has done. The head has answered what it received.
    """
    done = [
        {*actions[: min(finished[name] for name in segment.devices)]}
        for segment, actions in zip(plan.segments, lists, strict=True)
    ]
    done.append({Action(BACKWARD, each.micro_batch) for each in done[-1]})
    for stage, (segment, actions) in enumerate(zip(plan.segments, lists, strict=True)):
        for name in segment.devices:
            left = actions[finished[name] :]
            if left and ready(left[0], stage, done):
                return name
    return None
