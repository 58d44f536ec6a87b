"""``collapipe device measure --from``: keep the steps that a run measured, for later runs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from client_app.cluster_state import block_cost, described
from client_app.devices.measured_law import known_profile
from collapipe import config
from collapipe.cli.device.law_table import Measured, show
from collapipe.cli.device.trial_run import laws_of
from collapipe.cli.run import absolute
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import DeviceCluster
from collapipe.inventory.measured_step import options_of, write_steps
from collapipe.run_report.packed import read_requests
from collapipe.runs.folder import REQUESTS
from collapipe.runs.reading import read_run
from collapipe.state import ClusterState, DeviceProfile
from optim.simulated_plan import with_hops


def take_steps(file: Path, run_dir: Path, overrides: Sequence[str], write: bool) -> int:
    """Print the laws in the last checkpoint of a run with the options ``overrides``, and with
    ``write`` write them to the inventory's step file. Returns 1 if a unit has no law, else 0.

    Raises ``ConfigError`` for an invalid file or folder, other options, and other devices.
    """
    run, given = read_run(run_dir), config.own_overrides(overrides)
    settings = config.load_overrides(absolute(given, config.outline(given), run_dir))
    was, own = options_of(run.tree), options_of(settings.tree)
    if other := [name for name in own if was[name] != own[name]]:
        raise ConfigError(f"{run_dir}: was run with another {', '.join(other)}; give its options")
    cluster, laws = DeviceCluster(str(file), run.num_units), laws_of(run_dir, run.num_units)
    planned = {c.unit: c for each in read_requests(run) for c in each.clusters if c.real_devices}
    size, found = settings.batch_size, list[Measured]()
    for unit, law in enumerate(laws):
        if law is None:
            lacks = f"{run_dir}: no checkpoint has measured times of unit {unit}"
            print(f"error: {lacks}; name a run on real devices with checkpoints", file=sys.stderr)
            continue
        if unit not in planned:
            raise ConfigError(f"{run_dir / REQUESTS}: lacks plans of unit {unit}; restore the file")
        devices = described(settings, cluster, unit)
        if changed := _changed(devices, planned[unit], size):
            raise ConfigError(f"{file}: describes {changed} otherwise than {run_dir}; omit --from")
        for each in devices:
            known, times = known_profile(each, law, size), law.devices.get(each.name)
            known = with_hops(known, times, size / law.num_micro_batches) if times else known
            found.append(Measured((str(unit), each.name), known.time, law.spread, law.spread))
    if found:
        show(found, block_cost(settings), settings.task.max_length, "; off: of steps")
    if found and write:
        print(f"written     steps to {write_steps(file, run.tree, laws)}, to plan the first round")
    return 0 if all(laws) else 1


def _changed(devices: Sequence[DeviceProfile], last: ClusterState, batch_size: int) -> str:
    """Return the names of devices that were described otherwise in the run's ``last`` request: a
    law is relative to the description."""
    earlier = {(each.name, each.time, each.links) for each in last.devices}
    known = (known_profile(each, last.step, batch_size) for each in devices)
    current = {(each.name, each.time, each.links) for each in known}
    return ", ".join(sorted({name for name, *_ in current ^ earlier}))
