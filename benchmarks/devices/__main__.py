"""Daemons in processes of their own, measured: ``python -m benchmarks.devices ROW``.

Both sides of each ratio take turns in one run. Prints a table and writes ROW.json.
"""

import argparse
from pathlib import Path

from benchmarks.devices import (
    availability,
    capacity,
    cores,
    hop,
    iteration,
    memory,
    neighbours,
    predictions,
    recovery,
    replicas,
)

ROWS = {
    each.__name__.rpartition(".")[2]: each
    for each in (
        *(iteration, hop, neighbours, predictions, recovery, availability),
        *(cores, memory, capacity, replicas),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    rows = parser.add_subparsers(dest="row", required=True)
    for name, module in ROWS.items():
        row = rows.add_parser(name, description=module.__doc__, help=module.__doc__)
        row.add_argument("--output", type=Path, default=Path("outputs/devices"))
        row.add_argument("--turns", type=int, default=20)
        module.add_arguments(row)
        row.set_defaults(main=module.main)
    arguments = parser.parse_args()
    arguments.main(arguments)


if __name__ == "__main__":
    main()
