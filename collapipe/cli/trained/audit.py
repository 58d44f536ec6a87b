"""``collapipe audit``: measure how much of its units' texts a run's server could read."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console

from collapipe.audit import sections
from collapipe.audit.attack import audit
from collapipe.audit.material import Material
from collapipe.audit.result import JSON_FILE, PICTURE, Audit, read_audit
from collapipe.errors import ConfigError, printable
from collapipe.formatting import counted, print_lines, print_table
from collapipe.process import files
from collapipe.runs.reading import read_run


def audit_run(
    run_dir: Path, public: Path, rows: int, trusted: Sequence[str], unit: int | None
) -> None:
    """Attack ``rows`` of the run's validation set.

    Prints a table, and writes ``audit.json`` and a picture to the run's folder. Raises
    ``ConfigError``, before it computes anything, if the run has not ended or files are invalid.
    """
    run = read_run(run_dir)
    if run.summary is None:
        raise ConfigError(
            f"{run_dir}: the run has not ended, or it was killed; wait for its end, or continue it:"
            f" collapipe resume {quote(str(run_dir))}"
        )
    _check_replaceable(run_dir)
    held = Material.of(run_dir, trusted, unit, public, rows)
    found = audit(held, trained_rounds=len(run.rounds))
    show(found, Console(highlight=False, markup=False))
    _write(run_dir, found)


def _check_replaceable(run_dir: Path) -> None:
    """Raise ``ConfigError`` if a file would be replaced that no audit wrote."""
    picture = run_dir / PICTURE
    before = read_audit(run_dir)
    if picture.is_symlink() or (picture.exists() and (before is None or not picture.is_file())):
        raise ConfigError(f"{picture}: no audit wrote it; move it away")


def _write(run_dir: Path, found: Audit) -> None:
    file, picture = run_dir / JSON_FILE, run_dir / PICTURE
    try:
        with files.replacing(file) as partial:
            partial.write_text(found.json_text(), encoding="utf-8")
        sections.draw(found, picture)
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: cannot be written ({error.strerror}); make room, or audit a copy of it"
        ) from error
    for written in (file, picture):
        print(printable(str(written)))


def show(found: Audit, console: Console) -> None:
    """Print a summary of the attack, the tables, and other messages that reveal rows."""
    console.print(
        f"{counted(found.rows, 'validation row')} with {counted(found.tokens, 'token')}, "
        f"{counted(found.public_rows, 'public row')}, seed {found.seed}. "
        f"{sections.headline(found)} {sections.baseline(found)} Recovered tokens, % "
        "(95 % interval):",
        soft_wrap=True,
    )
    for title, columns, rows in sections.tables(found):
        console.print(f"\n{title}", style="bold", soft_wrap=True)
        print_table(console, columns, rows)
    console.print()
    lines = ("targets", found.targets), ("updates", sections.updates_text(found))
    print_lines(console, [*lines, ("membership", sections.membership_text(found))])
