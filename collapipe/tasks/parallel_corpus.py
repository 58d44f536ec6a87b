"""A corpus of parallel text: a file a language and split, or a dataset on the hub."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from collapipe.data.folders import read_lines
from collapipe.data.sources import read
from collapipe.errors import ConfigError, DataError
from collapipe.sections import DataSettings
from collapipe.tasks.translation import Translation
from collapipe.text.splits import Splits


@dataclass(frozen=True, slots=True)
class ParallelCorpus(Translation):
    """Parallel text: line n of one file translates line n of the other.

    Attributes
    ----------
    name
        As in ``task=NAME``.
    root
        Folder with ``{train,valid,test}.{source,target}``, plain or .gz (plain first); None: the
        hub.
    hub_name
        Dataset on the hub with the splits train, validation and test and a column a language.
    source, target
        Languages, as in the files' or columns' names.
    """

    name: str
    root: str | None
    hub_name: str
    source: str
    target: str

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for fields that no corpus fits."""
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}; set two")

    def splits(self, seed: int) -> Splits:
        """Rows as the corpus orders them, whatever the seed; a folder's blank pairs are left out.

        Raises ``DataError`` for a folder, file or line that cannot be read or paired.
        """
        if self.root is None:
            hub = DataSettings(
                name=self.hub_name, source_column=self.source, target_column=self.target
            )
            return read(hub, self.columns, seed)
        folder = Path(self.root)
        if not folder.is_dir():
            raise DataError(f"{self.name}: there is no folder {folder}; correct data.root")
        train, validation, test = (
            _paired(_read(folder, split, self.source), _read(folder, split, self.target))
            for split in ("train", "valid", "test")
        )
        return Splits(train, validation, test)


@dataclass(frozen=True, slots=True)
class _Side:
    """One language's lines and the name of the place they come from."""

    where: str
    lines: list[str]


def _read(folder: Path, split: str, language: str) -> _Side:
    file = read_lines(folder, f"{split}.{language}")
    return _Side(str(file.path), [line.strip() for line in file.lines])


def _paired(source: _Side, target: _Side) -> Dataset:
    counts = len(source.lines), len(target.lines)
    if counts[0] != counts[1]:
        raise DataError(
            f"{source.where} has {counts[0]} lines, {target.where} has {counts[1]}; "
            "line n of one must translate line n of the other"
        )
    pairs = list(zip(source.lines, target.lines, strict=True))
    for number, pair in enumerate(pairs, 1):
        if any(pair) and not all(pair):
            blank = target if pair[0] else source
            raise DataError(f"{blank.where}:{number} is blank, its translation is not; fill it in")
    rows = [{"source": left, "target": right} for left, right in pairs if left]
    if not rows:
        raise DataError(f"{source.where} and {target.where} hold no text; a split needs one row")
    return Dataset.from_list(rows)
