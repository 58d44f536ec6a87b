"""Format figures for people: three digits, a unit, and tables for 80 columns without colour."""

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collapipe.plan import Certificate, Span

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_LABEL_COLUMNS, _LEAST_COLUMNS, _ENDLESS_COLUMNS = 12, 20, 10_000
_PROVED_GAP = 1e-9
_LEAST_WATTS = 1e-3


def seconds(value: float) -> str:
    """Return a time with three digits and a suitable unit."""
    if value == 0:
        return "0 s"
    scale, unit = next((pair for pair in _UNITS if _rounded(value) >= pair[0]), _UNITS[-1])
    scaled = value / scale
    text = f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:#.3g}".rstrip(".")
    return f"{text} {unit}"


def _rounded(value: float) -> float:
    """Return the value with three digits, so that 999.9 ms are 1 s and not 1,000 ms."""
    return float(f"{value:.3g}")


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], spare: int = 0
) -> bool:
    """Print a table with names on the left and untruncated figures on the right.

    On a narrow terminal the last ``spare`` columns are dropped; if that is not enough, lines
    overrun. Returns whether all columns were printed.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # a name is no markup
    endless = console.options.update(width=_ENDLESS_COLUMNS)
    table.width = console.measure(table, options=endless).maximum
    if spare and table.width > console.width:
        print_table(console, columns[:-spare], [row[:-spare] for row in rows])
        return False
    console.print(table, crop=False)
    return True


def print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Print labels in a column, with texts wrapped to their right."""
    for label, text in lines:
        indent = " " * _LABEL_COLUMNS
        width = max(_LEAST_COLUMNS, console.width - _LABEL_COLUMNS)
        wrapped = textwrap.wrap(text, width, break_on_hyphens=False)
        print_line(console, f"{label:<{_LABEL_COLUMNS}}" + f"\n{indent}".join(wrapped))


def print_line(console: Console, text: str) -> None:
    """Print a text unchanged: nothing in it is markup, an emoji's name, or a place to break it."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def three_digits(value: float) -> str:
    """Return a number with at most three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def amount(value: float, unit: str) -> str:
    """Return an amount with three digits and a suitable prefix: ``1.5 GB``."""
    scale, prefix = next((pair for pair in _PREFIXES if _rounded(value) >= pair[0]), _PREFIXES[-1])
    return f"{three_digits(value / scale)} {prefix}{unit}"


def watts(value: float) -> str:
    """Return a power with three digits and a suitable unit."""
    if value >= _LEAST_WATTS:
        return f"{three_digits(value)} W"
    return f"{three_digits(value * 1e6)} uW"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 device``, ``2 devices``, ``2,000 batches``."""
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}{'e' * noun.endswith('ch')}s"


def block_range(span: Span) -> str:
    """Return the blocks of a span: ``3`` or ``0-2``, counted from 0."""
    return f"{span.first}" if span.blocks == 1 else f"{span.first}-{span.stop - 1}"


def certainty(certificate: Certificate, family: str, better: str) -> str:
    """Return how far a solution may be from the best of its family, its solver, and the time that
    it took."""
    took = f"found by {certificate.solver} in {seconds(certificate.solve_time_s)}"
    if certificate.lower_bound <= 0:
        return f"how far from the best is not known; {took}"
    if certificate.gap <= _PROVED_GAP:
        return f"no {family} is {better} under this law (gap 0); {took}"
    return f"at most {certificate.gap:.2%} above the best {family} under this law; {took}"
