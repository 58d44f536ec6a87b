"""``collapipe report``: read the folders, choose the page, write one file."""

from collections.abc import Sequence
from pathlib import Path

from collapipe.errors import ConfigError, printable
from collapipe.report import RoundReport
from collapipe.run_report.frame import GENERATOR
from collapipe.run_report.page import run_page
from collapipe.runs.reading import Run, latest_run, read_run

_HEAD = 2000  # characters of a page, in which it says who wrote it


def write_report(folders: Sequence[Path], output: Path | None, number: int | None) -> None:
    """Write the page of a run, by default the latest, or of the comparison of several, and print
    where it is.

    ``number`` is the round of the Gantt chart, by default the last that was planned. Raises
    ``ConfigError`` for folders of no run, and where the file is not ours to replace.
    """
    runs = [read_run(folder) for folder in folders or [latest_run()]]
    if len(runs) == 1:
        file = output or runs[0].folder / "report.html"
        page = run_page(runs[0], _shown(runs[0], number))
    elif number is not None:
        raise ConfigError(f"--round {number}: is drawn for one run, not for {len(runs)}")
    else:
        from collapipe.run_report.comparison import comparison_page  # and matplotlib, a second

        file = output or Path("report.html")
        page = comparison_page(runs)
    _write(file, page)
    print(printable(str(file)))


def _shown(run: Run, number: int | None) -> RoundReport | None:
    planned = [line for line in run.rounds if line.plan.clusters]
    if number is None:
        return planned[-1] if planned else None
    for line in planned:
        if line.round == number:
            return line
    held = f"{planned[0].round} … {planned[-1].round}" if planned else "none"
    raise ConfigError(f"--round {number}: {run.folder} has no plan of it; planned rounds: {held}")


def _write(file: Path, page: str) -> None:
    try:
        if file.is_symlink():  # a folder's own may lead anywhere, to no file as well
            raise ConfigError(f"{file}: is a link; choose another --output")
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ConfigError(f"{file}: is no file; choose another --output")
        if file.exists():
            with file.open(encoding="utf-8", errors="replace") as old:
                if GENERATOR not in old.read(_HEAD):
                    raise ConfigError(
                        f"{file}: exists and is no report of ours; choose another --output"
                    )
        # A file may hold halves of characters that no encoding knows.
        file.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror})") from error
