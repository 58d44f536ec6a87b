"""Texts and labels as a folder of .tsv files: ``text<TAB>label number``, names in labels.txt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collapipe.data.split_files import Lines, read_lines
from collapipe.errors import DataError


def parse_labelled(file: Lines) -> list[dict[str, Any]]:
    """Columns ``text`` and ``label``, the label's name. Raises ``DataError`` with file and line."""
    names = _names(file.path.parent)
    lines = enumerate(file.lines, 1)
    return [_row(line, names, file.at(number)) for number, line in lines if line.strip()]


def _names(folder: Path) -> dict[str, str]:
    """A label's number as it is written → its name."""
    listed = read_lines(folder, "labels.txt")
    names = [line.strip() for line in listed.lines if line.strip()]
    if not names:
        raise DataError(f"{listed.path} is empty; it names a label a line")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{listed.path}: two labels are called {twice!r}; give each its own name")
    return {str(number): name for number, name in enumerate(names)}


def _row(line: str, names: Mapping[str, str], where: str) -> dict[str, Any]:
    text, label = (part.strip() for part in line.rpartition("\t")[::2])
    if not text or not label:
        raise DataError(f"{where} is not a text, a tab and a label's number; correct the line")
    if label not in names:
        raise DataError(
            f"{where}: label {label!r} is no line of labels.txt, counted from 0 to "
            f"{len(names) - 1}; add its name there, or correct the number"
        )
    return {"text": text, "label": names[label]}
