"""A command whose first argument names a module, which has ``add_arguments`` and ``main``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.arguments import writable


def run_row(
    description: str | None,
    modules: Sequence[ModuleType],
    output: Path,
    add_shared: Callable[[argparse.ArgumentParser], object],
) -> None:
    """Parse the command line, and run the row's ``main``. All rows have ``--output`` and the
    arguments that ``add_shared`` adds."""
    parser = argparse.ArgumentParser(description=description)
    rows = parser.add_subparsers(dest="row", required=True)
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        row = rows.add_parser(name, description=module.__doc__, help=module.__doc__)
        row.add_argument("--output", type=writable, default=output)
        module.add_arguments(row)
        add_shared(row)
        row.set_defaults(main=module.main)
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.main(arguments)
