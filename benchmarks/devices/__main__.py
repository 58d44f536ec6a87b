"""Measurements of daemons in separate processes: ``python -m benchmarks.devices ROW``.

Both sides of each ratio take turns in one run. Prints a table and writes ROW.json.
"""

from argparse import ArgumentParser
from pathlib import Path

from benchmarks.arguments import at_least
from benchmarks.devices import (
    availability,
    capacity,
    copies,
    cores,
    hop,
    iteration,
    measuring,
    memory,
    neighbours,
    one_machine,
    predictions,
    recovery,
    replicas,
    sharing,
)
from benchmarks.rows import run_row

ROWS = (
    *(iteration, hop, neighbours, predictions, recovery, availability),
    *(cores, memory, capacity, replicas, sharing, one_machine, measuring, copies),
)


def add_turns(row: ArgumentParser) -> None:
    row.add_argument("--turns", type=at_least(1), default=20)


if __name__ == "__main__":
    run_row(__doc__, ROWS, Path("outputs/devices"), add_turns)
