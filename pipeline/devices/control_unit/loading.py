"""Load a plan's segments: dial the devices, send the blocks that they lack, and open the hops."""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial

from collapipe.errors import StageError, WireError
from collapipe.models.split import block_name
from collapipe.plan import SegmentPlan
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.parts import numbered
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit.connection import DeviceConnection
from pipeline.devices.control_unit.descriptions import describe_segment
from pipeline.devices.control_unit.dialling import dial_all
from pipeline.devices.control_unit.pairs import pairs
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.encoding import MOST_JSON_BYTES, packed, unpacked
from pipeline.devices.hops import Side, relay
from pipeline.devices.messages import BEFORE, BEHIND, PartHeader, Wanted, neighbour_name


def load(placed: Placement) -> None:
    """Load each device's segment, and connect the devices in their order.

    A device may still be busy for another caller, such as a cancelled round; the wait for it is
    limited by the cluster's ``busy_s``. Raises as ``Placement.wait`` and ``dial_all`` do.
    """
    names, cluster, segments = placed.plan.devices, placed.cluster, placed.plan.segments
    held = {
        block_name(k): leader
        for each in segments
        for k, leader in zip(each.span.indices(), each.leaders, strict=True)
    }
    placed.replica.expect(placed.common.epoch, held)
    new = [name for name in names if name not in placed.connections]
    dial_all(new, partial(_dial, placed), placed.release, placed.hung_s, cluster.busy_s)
    sessions, base = {name: secrets.token_hex(16) for name in names}, placed.replica.step
    for name in names:
        described = describe_segment(name, placed.plan, cluster, placed.common, base, sessions)
        frame = placed.frame(FrameKind.LOAD, 0, packed(described))
        placed.connections[name].control.send(frame)
    answers = placed.all_answer(FrameKind.WANTED)
    placed.send_to_all(FrameKind.OPEN)
    wanted = dict(zip(names, map(_wanted, placed.members, answers), strict=True))
    for segment in segments:
        for name in segment.devices:
            placed.hosts[name] = wanted[name].host
            for block in map(block_name, segment.span.indices()):
                _send_block(placed, name, block, wanted[name], leads=held[block] == name)
    _connect(placed, sessions)
    placed.all_answer(FrameKind.READY)


def _dial(placed: Placement, name: str) -> None:
    """Connect a device. Raises ``StageError`` if it does not answer, or is busy."""
    cluster, replica = placed.cluster, placed.replica
    if name not in cluster.devices:
        raise StageError(name, "the cluster's file has no such device")
    how = cluster.channels, placed.arrived, replica.put, replica.most_bytes()
    placed.connections[name] = DeviceConnection(cluster.devices[name], *how)


def _wanted(connection: DeviceConnection, answer: Frame) -> Wanted:
    """Return the blocks that the device lacks. Raises ``StageError`` for an invalid answer."""
    try:
        return unpacked(Wanted, answer.only(1)[0])
    except WireError as error:
        raise StageError(connection.name, f"sent {error}") from error


def _send_block(placed: Placement, device: str, block: str, wanted: Wanted, leads: bool) -> None:
    """Send what a device lacks of a block: weights now, optimiser state later, which only the
    device that ``leads`` the block needs. Each part is read from the replica when it is sent."""
    if block in wanted.blocks:
        whole = block in wanted.frozen or block not in placed.common.frozen
        found = placed.replica.parts(block, whole)
        groups = [keys for keys in found if leads or not _of_state(keys)]
    elif block in wanted.states:  # an empty part if there is no state yet
        found = placed.replica.parts(block, whole=False)
        groups = [keys for keys in found if _of_state(keys)] or [()]
    else:
        return
    control = placed.connections[device].control
    for left, keys in numbered(groups):
        make = partial(_part, placed, block, left, keys)
        if _of_state(keys) or block not in wanted.blocks:
            placed.state_parts.append((control, make))
        else:
            control.send_later(make)


def _of_state(keys: Sequence[str]) -> bool:
    """Whether these tensors of a block are optimiser state."""
    return any("/" in key for key in keys)


def _part(placed: Placement, block: str, left: int, keys: Sequence[str]) -> Frame:
    data = placed.replica.packed(block, keys)
    return placed.frame(FrameKind.PART, 0, packed(PartHeader(block, left)), data)


def _connect(placed: Placement, sessions: Mapping[str, str]) -> None:
    """Open the control unit's streams to the first segment's input and the last segment's output,
    and those between devices whose tensors pass the control unit."""

    def opened(device: str, name: str) -> FrameStream:
        placed.hops.append(placed.connections[device].hop(sessions[device], name))
        return placed.hops[-1]

    def side(segment: SegmentPlan, place: str) -> Side:
        name = neighbour_name(place, 0)
        streams = [opened(device, name) for device in segment.devices]
        return Side(dict(enumerate(streams)), segment.device_rows)

    segments = placed.plan.segments
    placed.front, placed.back = side(segments[0], BEFORE), side(segments[-1], BEHIND)
    for pair in pairs(placed.plan) if placed.cluster.relay else ():
        ends = opened(pair.first, pair.name_of_second), opened(pair.second, pair.name_of_first)
        for stream in ends:
            stream.max_bytes = placed.replica.most_bytes() + MOST_JSON_BYTES
        relay(*ends)
