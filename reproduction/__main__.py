"""``python -m reproduction FIGURE``: compute figures of the paper; say where they agree.

FIGURE is fig04, fig05, fig07, fig08, spreads, fig11 or frameworks, together: modelled; table3,
which is measured on this machine; fig06, fig06_users, fig09, fig10 or remark2, which train, the
last without data; or all. Training goes on where it was interrupted: finished runs in OUTPUT/runs
are not run again.
"""

import argparse
from pathlib import Path

from collapipe.errors import CollaPipeError, printable
from collapipe.process.streams import complain
from reproduction.command import reproduce


def main() -> None:
    """Compute what the arguments ask for."""
    parser = argparse.ArgumentParser(
        "python -m reproduction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", help="such as fig04; or modelled, or all")
    parser.add_argument("--seeds", type=int, help="how many; default: as in the results")
    parser.add_argument("--output", type=Path, default=Path("outputs/reproduction"))
    parser.add_argument(
        "--data", type=Path, help="has multi30k, chinese_ner, toutiao15; default: $COLLAPIPE_DATA"
    )
    parser.add_argument("--full", action="store_true", help="models of the paper's sizes: days")
    arguments = parser.parse_args()
    try:
        reproduce(
            arguments.figure, arguments.seeds, arguments.output, arguments.data, arguments.full
        )
    except CollaPipeError as error:
        complain(f"error: {printable(str(error))}")
        raise SystemExit(error.exit_status) from None


if __name__ == "__main__":
    main()
