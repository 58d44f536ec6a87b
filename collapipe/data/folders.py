"""A folder with a file a split, plain or packed, in a task's own format."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from collapipe.data.files import text_lines
from collapipe.errors import ConfigError, DataError

OUTSIDE = "O"
_TAG = re.compile(r"O|[BI]-\S+")


@dataclass(frozen=True, slots=True)
class Splits:
    """A task's rows. ``train`` is divided into the units' shards, the others stay on the server."""

    train: Dataset
    validation: Dataset
    test: Dataset


@dataclass(frozen=True, slots=True)
class Lines:
    """A file's lines without their breaks, and the file's name for messages."""

    path: Path
    lines: list[str]

    def at(self, number: int) -> str:
        """Such as ``folder/train.tsv:7``, counted from 1."""
        return f"{self.path}:{number}"


Parse = Callable[[Lines], list[dict[str, Any]]]


def read_splits(task: str, root: str | None, suffix: str, parse: Parse) -> Splits:
    """Rows that ``parse`` finds in ``root/{train,valid,test}.suffix``.

    Raises ``ConfigError`` where the user brings no rows at all, ``DataError`` for a folder or file
    that cannot be read or holds none.
    """
    if root is None:
        raise ConfigError(
            f"task {task}: no rows; set data.root=FOLDER, data.train_file=FILE, "
            "data.name=HUB_NAME or data=synthetic"
        )

    def read(folder: Path, split: str) -> Dataset:
        file = read_lines(folder, f"{split}.{suffix}")
        if rows := parse(file):
            return Dataset.from_list(rows)
        raise DataError(f"{file.path} holds no rows; a split needs one")

    return read_each_split(task, root, read)


def read_each_split(task: str, root: str, read: Callable[[Path, str], Dataset]) -> Splits:
    """What ``read`` finds for train, valid and test in the folder ``root``."""
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"{task}: there is no folder {folder}; correct data.root")
    return Splits(*(read(folder, split) for split in ("train", "valid", "test")))


def read_lines(folder: Path, name: str) -> Lines:
    """Lines of ``name`` or of ``name.gz``, plain first. Raises ``DataError``."""
    path = next((folder / n for n in (name, f"{name}.gz") if (folder / n).is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz; add it, or set data.root")
    return Lines(path, [line.removesuffix("\n").removesuffix("\r") for line in text_lines(path)])


def parse_labelled(file: Lines) -> list[dict[str, Any]]:
    """Columns ``text`` and ``label``, a name, of lines ``text<TAB>label number``.

    Raises ``DataError`` with file and line.
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
                f"{where}: label {label!r} is no line of labels.txt, counted from 0 to "
                f"{len(names) - 1}; add its name there, or correct the number"
            )
        rows.append({"text": text, "label": names[label]})
    return rows


def _label_names(folder: Path) -> dict[str, str]:
    """A label's number as it is written → its name."""
    listed = read_lines(folder, "labels.txt")
    names = [line.strip() for line in listed.lines if line.strip()]
    if not names:
        raise DataError(f"{listed.path} is empty; it names a label a line")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{listed.path}: two labels are called {twice!r}; give each its own name")
    return {str(number): name for number, name in enumerate(names)}


def parse_tagged(file: Lines) -> list[dict[str, Any]]:
    """Columns ``tokens`` and ``tags`` of lines ``word tag``, blank between sentences.

    Raises ``DataError`` with file and line.
    """
    rows: list[dict[str, Any]] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*file.lines, ""], 1):
        if line.strip():
            where, parts = file.at(number), line.replace("\t", " ").split(" ")
            if len(parts) != 2 or not parts[0]:
                raise DataError(f"{where} is not a word, a blank and its tag; correct the line")
            words.append(parts[0])
            tags.append(check_tag(parts[1], tags[-1] if tags else OUTSIDE, where))
        elif words:
            rows.append({"tokens": words, "tags": tags})
            words, tags = [], []
    return rows


def check_tag(tag: str, before: str, where: str) -> str:
    """``tag``; raises ``DataError`` with ``where`` it stands if IOB2 has none such behind
    ``before``, which is O at a sentence's start."""
    if wrong := _fault(tag, before):
        raise DataError(f"{where}: tag {tag!r} {wrong}")
    return tag


@functools.lru_cache  # a corpus has many words and few tags
def _fault(tag: str, before: str) -> str | None:
    if _TAG.fullmatch(tag) is None:
        return "is not O, B-TYPE or I-TYPE; write it as IOB2 does"
    kind = tag[2:]
    if tag.startswith("I-") and before[2:] != kind:
        return f"continues no entity; in IOB2 an entity begins with B-{kind}, convert the tags"
    return None
