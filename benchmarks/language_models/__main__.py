"""Measurements of language models: ``python -m benchmarks.language_models ROW``.

Both sides of each ratio take turns in one run. Prints a table and writes ROW.json.
"""

from argparse import ArgumentParser
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
from benchmarks.rows import run_row

ROWS = fits, memory, limited, speed, learning, units, generation, quantised, gpu


def add_overrides(row: ArgumentParser) -> None:
    row.add_argument("overrides", nargs="*", help="options of all runs")


if __name__ == "__main__":
    run_row(__doc__, ROWS, Path("outputs/language_models"), add_overrides)
