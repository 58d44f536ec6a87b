"""``collapipe device check``: what an inventory's devices and hops are like, and which fail."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from client_app.survey import ANSWER_S, Box, Hop, ask_all, expires_soon, hops, own_credentials
from collapipe import __version__
from collapipe.errors import printable
from collapipe.formatting import amount, block_range, print_lines, print_table, seconds
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import load
from collapipe.wire.dialing import Dialer
from collapipe.wire.inquiries import DeviceStatus

_COLUMNS = ("device", "doing", "version", "torch", "memory", "free", "speed", "certificate")
_HOP_COLUMNS = ("hop", "round trip", "rate")
_CONTROL_UNIT = "control unit"


def check(file: Path, as_json: bool) -> int:
    """Print a row a device and a row a hop; 1 where any fails, with the reason, else 0.

    Raises ``ConfigError`` for a bad file or credentials.
    """
    section = load(file).parse(InventorySection)
    own = own_credentials(file, section)
    dialer = Dialer(own, ANSWER_S)
    clusters = ask_all(section, dialer)
    boxes = [box for each in clusters for box in each]
    found = [hop for each in clusters for hop in hops(each, dialer)]
    if as_json:
        print(json.dumps(_answer(boxes, found), indent=2, allow_nan=False))
    else:
        _show(boxes, found)
    expiries = [(box.device.name, box.status.expires) for box in boxes if box.status]
    expiries += [(_CONTROL_UNIT, own.expires)] if own else []
    for name, expires in expiries:
        if expires is not None and expires_soon(expires):
            print(f"warning: {name}: certificate expires {expires:%F}; renew it", file=sys.stderr)
    faults = [box.fault for box in boxes if box.fault]
    faults += [f"{_way(hop)}: {hop.fault}" for hop in found if hop.fault]
    for fault in faults:
        print(f"error: {printable(fault)}", file=sys.stderr)
    return 1 if faults else 0


def _show(boxes: Sequence[Box], found: Sequence[Hop]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    print_table(console, _COLUMNS, [(box.device.name, *_told(box)) for box in boxes])
    console.print()
    rows = [(_way(hop), *_times(hop)) for hop in found]
    print_table(console, _HOP_COLUMNS, rows)
    lines = [
        ("speed", "products of matrices, more than training reaches; not while a device works"),
        ("rate", "one way, of messages that went there and back in the same time each way"),
    ]
    print_lines(console, lines)


def _told(box: Box) -> tuple[str, ...]:
    status = box.status
    if status is None:
        return ("fails", *"------")
    speed, expires = status.flops_per_s, status.expires
    return (
        "fails" if box.fault else _doing(status),
        status.version,
        status.torch_device,
        amount(status.memory_bytes, "B"),
        amount(status.free_bytes, "B"),
        amount(speed, "FLOP/s") if speed else "-",
        f"{expires:%F}" if expires else "none",
    )


def _doing(status: DeviceStatus) -> str:
    if not status.busy or status.span is None:
        return "busy" if status.busy else "idle"
    return f"unit {status.unit}: {block_range(status.span)}"


def _times(hop: Hop) -> tuple[str, str]:
    if hop.round_trip_s is None:
        return "fails" if hop.fault else "-", "-"
    return seconds(hop.round_trip_s), amount(hop.rate_bps, "bit/s") if hop.rate_bps else "-"


def _way(hop: Hop) -> str:
    return " -> ".join(_ends(hop))


def _ends(hop: Hop) -> tuple[str, str]:
    source, target = (box.device.name if box else _CONTROL_UNIT for box in (hop.source, hop.target))
    return source, target


def _answer(boxes: Sequence[Box], found: Sequence[Hop]) -> dict[str, Any]:
    """What scripts read, so that its names are fixed."""
    devices = [
        {
            "cluster": box.cluster,
            "name": box.device.name,
            "address": box.device.address,
            "error": box.fault,
            "status": _status(box.status),
        }
        for box in boxes
    ]
    times = [
        {
            **dict(zip(("source", "target"), _ends(hop), strict=True)),
            "error": hop.fault,
            "round_trip_s": hop.round_trip_s,
            "rate_bps": hop.rate_bps,
        }
        for hop in found
    ]
    return {"version": __version__, "devices": devices, "hops": times}


def _status(status: DeviceStatus | None) -> dict[str, Any] | None:
    if status is None:
        return None
    told = asdict(status)
    del told["ticket"]
    return told | {"expires": status.expires and status.expires.isoformat()}
