"""Read a folder with one file per split, plain or gzipped, in a task's format."""

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset

from collapipe.data.files import text_lines
from collapipe.errors import DataError, NoRowsError
from collapipe.text.vocabulary import fault_of_label

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-\S+")


Rows: TypeAlias = Dataset | Callable[[], Dataset]


class Splits:
    """A task's rows: ``train`` is divided into the units' shards, other splits are for evaluation.

    ``drawn`` names the splits that are drawn from training rows. A split may be given as a
    function, which is called at the first use, so that unused splits are not read.
    """

    def __init__(
        self, train: Rows, validation: Rows, test: Rows, *, drawn: Collection[str] = ()
    ) -> None:
        self.drawn = drawn
        self._rows: dict[str, Rows] = {"train": train, "validation": validation, "test": test}

    @property
    def train(self) -> Dataset:
        return self._read("train")

    @property
    def validation(self) -> Dataset:
        return self._read("validation")

    @property
    def test(self) -> Dataset:
        return self._read("test")

    def _read(self, split: str) -> Dataset:
        rows = self._rows[split]
        if callable(rows):
            rows = self._rows[split] = rows()
        return rows


@dataclass(frozen=True, slots=True)
class Lines:
    """A file's lines without their breaks, and the file's name for messages."""

    path: Path
    lines: list[str]

    def at(self, number: int) -> str:
        """Return a line's place, such as ``folder/train.tsv:7``, counted from 1."""
        return f"{self.path}:{number}"


Parse = Callable[[Lines], list[dict[str, Any]]]


def read_splits(task: str, root: str, read: Callable[[Path, str], Dataset]) -> Splits:
    """Return the splits that ``read`` reads from the folder ``root``, each when it is used.

    Raises ``DataError`` if there is no such folder.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"{task}: there is no folder {folder}; correct data.root")
    return Splits(*(functools.partial(read, folder, each) for each in ("train", "valid", "test")))


def read_lines(folder: Path, name: str) -> Lines:
    """Read the lines of ``name``, or else of ``name.gz``. Raises ``DataError`` if that fails."""
    path = next((folder / n for n in (name, f"{name}.gz") if (folder / n).is_file()), None)
    if path is None:
        raise NoRowsError(f"{folder} lacks {name} and {name}.gz; add one, or set data.root")
    return Lines(path, [line.removesuffix("\n").removesuffix("\r") for line in text_lines(path)])


def parse_labelled(file: Lines) -> list[dict[str, Any]]:
    """Return rows of ``text`` and ``label`` (a name) from lines ``text<TAB>label number``.

    Raises ``DataError`` with file and line for an invalid line.
    """
    names, rows = _label_names(file.path.parent), []
    for number, line in enumerate(file.lines, 1):
        if not line.strip():
            continue
        where, (text, label) = file.at(number), map(str.strip, line.rpartition("\t")[::2])
        if not text or not label:
            raise DataError(f"{where} is not a text, a tab and a label's number; correct the line")
        if label not in names:
            raise DataError(
                f"{where}: label {label!r} must be a line of labels.txt, 0 … {len(names) - 1}; "
                "add its name there, or correct the number"
            )
        rows.append({"text": text, "label": names[label]})
    return rows


def _label_names(folder: Path) -> dict[str, str]:
    """Read ``labels.txt``; return label number, as text → label name."""
    listed = read_lines(folder, "labels.txt")
    lines = enumerate(map(str.strip, listed.lines), 1)
    named = {number: name for number, name in lines if name}
    for number, name in named.items():
        if fault := fault_of_label(name):
            raise DataError(f"{listed.at(number)}: {fault}")
    names = [*named.values()]
    if not names:
        raise DataError(f"{listed.path} is empty; write a label on each line")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{listed.path}: two labels are called {twice!r}; give each its own name")
    return {str(number): name for number, name in enumerate(names)}


def parse_tagged(file: Lines) -> list[dict[str, Any]]:
    """Return rows of ``tokens`` and ``tags`` from lines ``word tag``; blank lines end sentences.

    Raises ``DataError`` with file and line for an invalid line.
    """
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*file.lines, ""], 1):
        if line.strip():
            word, *tag = line.replace("\t", " ").split(" ")
            if not word or len(tag) != 1:
                raise DataError(
                    f"{file.at(number)} is not a word, a blank and its tag; correct the line"
                )
            if fault := fault_of(tag[0], tags[-1] if tags else OUTSIDE):
                raise DataError(f"{file.at(number)}: {fault}")
            words.append(word)
            tags += tag
        elif words:
            rows.append({"tokens": words, "tags": tags})
            words, tags = [], []
    return rows


@functools.lru_cache  # a corpus has many words and few tags
def fault_of(tag: str, before: str) -> str:
    """Return why ``tag`` cannot follow the tag ``before`` in IOB2 or is no label; empty if it can.

    At a sentence's start ``before`` is O.
    """
    if _TAG.fullmatch(tag) is None:
        return f"tag {tag!r} is not O, B-TYPE or I-TYPE; write it as IOB2 does"
    if tag.startswith("I-") and before[2:] != tag[2:]:
        begin = f"an entity begins with B-{tag[2:]}, convert the tags"
        return f"tag {tag!r} continues no entity; in IOB2 {begin}"
    return fault_of_label(tag)
