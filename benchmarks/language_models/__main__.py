"""Language models of today, measured: ``python -m benchmarks.language_models ROW``.

Both sides of each ratio take turns in one run. Prints a table and writes ROW.json.
"""

import argparse
from pathlib import Path

from benchmarks.language_models import (
    fits,
    generation,
    gpu,
    learning,
    limited,
    memory,
    quantised,
    speed,
    units,
)

ROWS = {
    each.__name__.rpartition(".")[2]: each
    for each in (fits, memory, limited, speed, learning, units, generation, quantised, gpu)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    rows = parser.add_subparsers(dest="row", required=True)
    for name, module in ROWS.items():
        row = rows.add_parser(name, description=module.__doc__, help=module.__doc__)
        row.add_argument("--output", type=Path, default=Path("outputs/language_models"))
        module.add_arguments(row)
        row.add_argument("overrides", nargs="*", help="options of all runs")
        row.set_defaults(main=module.main)
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.main(arguments)


if __name__ == "__main__":
    main()
