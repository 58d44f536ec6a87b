"""How many blocks each device of a cluster holds."""

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import SegmentPlan, Span
from collapipe.state import DeviceProfile


def even_partition(
    num_blocks: int, devices: tuple[DeviceProfile, ...], num_segments: int | None = None
) -> tuple[SegmentPlan, ...]:
    """⌊L/S⌋ or ⌈L/S⌉ blocks on each of the first S devices; the larger shares come first.

    Raises
    ------
    InfeasibleRoundError
        Where S exceeds the devices or the blocks.
    """
    segments = num_segments or len(devices)
    if not 1 <= segments <= min(num_blocks, len(devices)):
        raise InfeasibleRoundError(
            f"{segments} segments for {len(devices)} devices and {num_blocks} blocks; "
            "a segment needs a device and a block of its own: lower pipeline.num_segments"
        )
    share, larger = divmod(num_blocks, segments)
    plans, first = [], 0
    for index, device in enumerate(devices[:segments]):
        span = Span(first, share + (index < larger))
        plans.append(SegmentPlan(device.name, span))
        first = span.stop
    return tuple(plans)
