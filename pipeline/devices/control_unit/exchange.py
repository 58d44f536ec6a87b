"""Pass the parts that devices of a shared segment exchange, and keep copies of blocks."""

from collections.abc import Mapping

from collapipe.errors import WireError
from collapipe.models.split import block_name
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.wire.frames import Frame
from collapipe.wire.parts import separated
from pipeline.devices.control_unit.connection import DeviceConnection
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.messages import PartHeader, as_bytes, unpacked


class PartRouter:
    """Takes the parts that devices send: copies go to the ``replica``, gradients to the leading
    device of the segment, and its weights to the others.

    ``connections`` are the devices' connections by name.
    """

    def __init__(self, replica: Replica, connections: Mapping[str, DeviceConnection]) -> None:
        self._replica, self._connections = replica, connections
        self.step = -1  # the last one that has begun
        # replaced as a whole, because threads of all connections read it
        self._segments: tuple[int, Mapping[str, SegmentPlan]] = 0, {}

    def expect(self, epoch: int, plan: ClusterPlan) -> None:
        """Pass parts of this epoch's plan alone from now on."""
        shared = (each for each in plan.segments if len(each.devices) > 1)
        self._segments = epoch, {name: each for each in shared for name in each.devices}

    def put(self, sender: str, frame: Frame) -> None:
        """Take a part. Raises ``WireError`` if the sender may not send it, or it is invalid."""
        described, data = frame.only(2)
        header = unpacked(PartHeader, described)
        if header.role == "copy":
            self._replica.put(sender, frame)
            return
        epoch, segments = self._segments
        if frame.epoch != epoch:
            return
        self._check(sender, header, frame.step, segments.get(sender))
        form = self._replica.forms[header.block]
        tensors = separated(as_bytes(data))
        form.check(tensors)
        if not tensors.keys() <= form.trained:
            raise WireError(f"{header.role} of {header.block[:40]!r} that do not train")
        segment = segments[sender]
        leader, *others = segment.devices
        for name in (leader,) if header.role == "gradients" else others:
            if connection := self._connections.get(name):  # else it was lost a moment ago
                connection.control.send(frame)

    def _check(
        self, sender: str, header: PartHeader, step: int, segment: SegmentPlan | None
    ) -> None:
        if segment is not None and step <= self.step:
            blocks = set(map(block_name, segment.span.indices()))
            leads = sender == segment.device
            own = header.share in segment.shares_of(sender) if not leads else header.share == 0
            if header.block in blocks and own and leads == (header.role == "weights"):
                return
        raise WireError(
            f"{header.role} of share {header.share}, {header.block[:40]!r}, step {step}, which "
            "were not requested"
        )
