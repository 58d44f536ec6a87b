"""News for the user: how measured times moved blocks, and whether one process would be faster."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from collapipe.formatting import seconds
from collapipe.step_law import HeldStage, LaunchTimes, StepLaw, interval
from optim.step import DeviceWork, StageWork, step_s


def moved_blocks(
    law: StepLaw, stages: Sequence[HeldStage], old_s: float, new_s: float, rule: str | None
) -> Iterator[str]:
    """Yield messages on a plan with other ``stages`` than the last one, that of the ``law``.

    A step is expected to take ``new_s`` instead of ``old_s``. ``rule`` names the framework whose
    rule split the blocks.
    """
    old, new = (" + ".join(map(str, each)) for each in (law.stages, stages))
    by = f" by the rule of {rule}" if rule else ""
    yield (
        f"blocks are now {new} instead of {old}{by}: measured times give {seconds(new_s)} instead "
        f"of {seconds(old_s)} a step"
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


def without_devices(law: StepLaw, works: Sequence[StageWork], schedule: str) -> str | None:
    """Return a message if the ``works`` are all on the control unit's machine and a step in its
    process alone, in one thread without hops, is planned to be faster.

    The difference must exceed the prediction's error.
    """
    devices = [each for work in works for each in work.devices]
    if any(each.host != law.host for each in devices):
        return None
    forward_s = law.embedding_forward_s + sum(each.forward_s for each in devices) + law.submit_s
    backward_s = sum(each.backward_s for each in devices) + law.embedding_backward_s
    law = replace(law, launch=LaunchTimes())  # m stays, so it is not needed
    rest = replace(law, embedding_forward_s=0.0, embedding_backward_s=0.0, submit_s=0.0, send_s=0.0)
    alone = StageWork((DeviceWork(forward_s, backward_s, 0.0, law.host),))
    alone_s = step_s(rest, [alone], schedule)
    planned_s = step_s(law, works, schedule)
    if alone_s >= interval(planned_s, law.spread)[0]:
        return None
    return (
        f"devices share the control unit's machine: without cluster=devices a step would take "
        f"about {seconds(alone_s)} instead of {seconds(planned_s)}"
    )
