"""A folder with a file a split, plain or packed, in a task's own format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from collapipe.data.text_lines import text_lines
from collapipe.errors import ConfigError, DataError
from collapipe.text.splits import Splits


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
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"{task}: there is no folder {folder}; correct data.root")
    train, validation, test = (
        _rows(read_lines(folder, f"{split}.{suffix}"), parse)
        for split in ("train", "valid", "test")
    )
    return Splits(train, validation, test)


def read_lines(folder: Path, name: str) -> Lines:
    """Lines of ``name`` or of ``name.gz``, plain first. Raises ``DataError``."""
    path = next((folder / n for n in (name, f"{name}.gz") if (folder / n).is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {name} nor {name}.gz; add it, or set data.root")
    return Lines(path, [line.removesuffix("\n").removesuffix("\r") for line in text_lines(path)])


def _rows(file: Lines, parse: Parse) -> Dataset:
    rows = parse(file)
    if not rows:
        raise DataError(f"{file.path} holds no rows; a split needs one")
    return Dataset.from_list(rows)
