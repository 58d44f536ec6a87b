"""``collapipe device check``: show the state of an inventory's devices and hops."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from collapipe import __version__
from collapipe.cli.device.survey import (
    ANSWER_S,
    CONTROL_UNIT,
    Hop,
    SurveyedDevice,
    ask_all,
    own_credentials,
    time_hops,
)
from collapipe.cli.device.trial_round import fit_hop
from collapipe.credentials.member import expires_soon
from collapipe.errors import printable
from collapipe.formatting import amount, block_range, print_lines, print_table, seconds
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import load
from collapipe.wire.channels import Dialer
from pipeline.devices.messages import DeviceStatus

_COLUMNS = ("device", "doing", "version", "torch", "memory", "free", "speed", "certificate")
_HOP_COLUMNS = ("hop", "round trip", "rate")
_SIZES, _REPEATS = (1, 2**16, 2**20), 5  # of messages


def check(file: Path, as_json: bool) -> int:
    """Print a row per device and per hop, and errors; return 1 if one fails, else 0.

    Raises ``ConfigError`` for an invalid file or credentials.
    """
    section = load(file).parse(InventorySection)
    own = own_credentials(file, section)
    dialer = Dialer(own, ANSWER_S)
    clusters = ask_all(section, dialer)
    devices = [device for each in clusters for device in each]
    found = [hop for each in clusters for hop in time_hops(each, dialer, _SIZES, _REPEATS)]
    if as_json:
        print(json.dumps(_answer(devices, found), indent=2, allow_nan=False))
    else:
        _show(devices, found)
    for each in devices:
        counted_on, gives = each.device.memory_bytes, each.status and each.status.memory_bytes
        if counted_on and gives and gives < counted_on:
            less = f"gives {amount(gives, 'B')}, the file's memory_bytes {amount(counted_on, 'B')}"
            print(f"warning: {each.name}: {less}; lower that, or raise --memory", file=sys.stderr)
    expiries = [(each.name, each.status.expires) for each in devices if each.status]
    expiries += [(CONTROL_UNIT, own.expires)] if own else []
    for name, expires in expiries:
        if expires is not None and expires_soon(expires):
            print(f"warning: {name}: certificate expires {expires:%F}; renew it", file=sys.stderr)
    errors = [each.error for each in devices if each.error]
    errors += [f"{_way(hop)}: {hop.error}" for hop in found if hop.error]
    for error in errors:
        print(f"error: {printable(error)}", file=sys.stderr)
    return 1 if errors else 0


def _show(devices: Sequence[SurveyedDevice], found: Sequence[Hop]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    print_table(console, _COLUMNS, [(each.name, *_told(each)) for each in devices])
    console.print()
    print_table(console, _HOP_COLUMNS, [(_way(hop), *_times(hop)) for hop in found])
    lines = [
        ("speed", "products of matrices, more than training reaches; not while a device works"),
        ("rate", "one way, of messages that went there and back in the same time each way"),
    ]
    print_lines(console, lines)


def _told(device: SurveyedDevice) -> tuple[str, ...]:
    status = device.status
    if status is None:
        return ("fails", *"------")
    speed, expires = status.flops_per_s, status.expires
    return (
        "fails" if device.error else _doing(status),
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
    round_trip_s, rate_bps = _measured(hop)
    if round_trip_s is None:
        return "fails" if hop.error else "busy" if hop.busy else "-", "-"
    return seconds(round_trip_s), amount(rate_bps, "bit/s") if rate_bps else "-"


def _measured(hop: Hop) -> tuple[float | None, float | None]:
    """Return the round trip of the smallest message, and the rate one way; None if the hop was not
    timed, and for the rate if only one size was timed or the size of messages has no effect."""
    if not hop.trips:
        return None, None
    byte_s = fit_hop(hop.trips).each if len(hop.trips) > 1 else 0.0
    return hop.trips[0].seconds, 2 * 8 / byte_s if byte_s else None


def _way(hop: Hop) -> str:
    return f"{hop.source} -> {hop.target}"


def _answer(devices: Sequence[SurveyedDevice], found: Sequence[Hop]) -> dict[str, Any]:
    """Return the JSON output, with fixed names because scripts read it."""
    return {
        "version": __version__,
        "devices": [
            {
                "cluster": each.cluster,
                "name": each.name,
                "address": each.device.address,
                "error": each.error,
                "status": each.status and _status(each.status),
            }
            for each in devices
        ],
        "hops": [
            {
                "source": each.source,
                "target": each.target,
                "error": each.error,
                **dict(zip(("round_trip_s", "rate_bps"), _measured(each), strict=True)),
            }
            for each in found
        ],
    }


def _status(status: DeviceStatus) -> dict[str, Any]:
    return asdict(status) | {"expires": status.expires and status.expires.isoformat()}
