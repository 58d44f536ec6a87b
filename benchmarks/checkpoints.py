"""Memory and time of a checkpoint by the number of units, whose states are kept on disk before.

    python -m benchmarks.checkpoints --units 10 100 --megabytes 16

Units are scripted: each sends moments of the given size and accepts them again. Each number of
units has a separate process. Prints the seconds to gather and to restore all states, and the
increase of the process's peak memory.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import torch
from flwr.app import Context, Message

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import unknown_cluster
from collapipe.wire import records
from server_app import questions
from server_app.checkpoints.file import KeptFiles
from server_app.checkpoints.folder import CheckpointFolder
from server_app.kept_states import gather, restore
from server_app.roster import Roster
from server_app.units import Units
from tests.sections import run_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=at_least(1), nargs="+", default=[10, 100])
    parser.add_argument("--megabytes", type=at_least(1), default=16)
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    print(f"{'units':>6}{'gather s':>10}{'restore s':>11}{'memory MB':>11}")
    for units in arguments.units:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            gather_s, restore_s, grown = pool.apply(measured, (units, arguments.megabytes))
        print(f"{units:>6}{gather_s:>10.2f}{restore_s:>11.2f}{grown:>11.0f}", flush=True)


def measured(num_units: int, megabytes: int) -> tuple[float, float, float]:
    """Seconds to gather and to restore, and the increase of peak memory in MB."""

    def client(message: Message, context: Context) -> Message:
        groups = {}
        if message.metadata.message_type == records.KEEP:
            groups = {"optimizer": {"w/exp_avg": torch.randn(megabytes * 250_000)}}
        return Message(records.pack_groups(groups), reply_to=message)

    grid = InlineGrid(client, num_units)  # type: ignore[arg-type]
    settings = run_settings(num_units=num_units)
    units = Units(grid, settings, nodes=dict(enumerate(grid.get_node_ids())))
    roster = Roster(tuple(map(unknown_cluster, range(num_units))))
    with tempfile.TemporaryDirectory() as folder:
        files = CheckpointFolder(Path(folder))
        before, began = _peak_mb(), time.perf_counter()
        files.begin("000001")
        keep = questions.keep({"optimizer": megabytes * 10**6 + 2**16}, lambda kept: None)
        for unit, kept in gather(units, roster, lambda unit: keep):
            files.add("000001", unit, kept)  # type: ignore[arg-type]
        gathered = time.perf_counter()
        restore(units, KeptFiles(Path(folder) / "checkpoints" / ".000001.partial"))
        return gathered - began, time.perf_counter() - gathered, _peak_mb() - before


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
