"""Figures for people: three digits, a unit, tables that fit 80 columns and need no colour."""

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from collapipe.plan import Certificate

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LABEL_COLUMNS, _LEAST_COLUMNS = 12, 20
_PROVED_GAP = 1e-9


def seconds(value: float) -> str:
    """Three digits and the unit that suits them."""
    scale, unit = next((pair for pair in _UNITS if value >= pair[0]), _UNITS[-1])
    scaled = value / scale
    text = f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:#.3g}".rstrip(".")
    return f"{text} {unit}"


def figures_table(first: str, others: Sequence[str]) -> Table:
    """Names fold where the line is too narrow; figures stay whole."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Labels in a column, texts wrapped beside them."""
    for label, text in lines:
        indent = " " * _LABEL_COLUMNS
        width = max(_LEAST_COLUMNS, console.width - _LABEL_COLUMNS)
        wrapped = textwrap.wrap(text, width, break_on_hyphens=False)
        console.print(f"{label:<{_LABEL_COLUMNS}}" + f"\n{indent}".join(wrapped), soft_wrap=True)


def three_digits(value: float) -> str:
    """At most three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counted(number: int, noun: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def certainty(certificate: Certificate) -> str:
    """How far from the best an answer may be, who found it and how fast."""
    took = f"found by {certificate.solver} in {seconds(certificate.solve_time_s)}"
    if certificate.lower_bound <= 0:
        return f"how far from the best is not known; {took}"
    if certificate.gap <= _PROVED_GAP:
        return f"nothing is better (gap {certificate.gap:.2g}); {took}"
    return f"at most {certificate.gap:.2%} above the best; {took}"
