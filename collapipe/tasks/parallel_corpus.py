"""A corpus of parallel text: a file per language and split, or a data set on the hub."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from collapipe.data.folders import Splits, read_lines, read_splits
from collapipe.data.sources import read
from collapipe.errors import ConfigError, DataError
from collapipe.sections import DataSettings
from collapipe.tasks.translation import Translation


@dataclass(frozen=True, slots=True)
class ParallelCorpus(Translation):
    """Parallel text: line n of one file translates line n of the other.

    Attributes
    ----------
    name
        Name of the task, as in ``task=NAME``.
    root
        Folder with ``{train,valid,test}.{source,target}``, plain or .gz (plain first); None: the
        hub.
    hub_name
        Data set on the hub with splits train, validation and test and one column per language.
    source, target
        Languages, as in the names of files or columns.
    """

    name: str
    root: str | None
    hub_name: str
    source: str
    target: str

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}; set two")

    def splits(self, seed: int) -> Splits:
        """Return rows in the corpus's order; blank pairs of a folder are left out.

        Raises ``DataError`` for a folder, file or line that cannot be read or paired.
        """
        if self.root is not None:
            return read_splits(self.name, self.root, self._paired)
        hub = DataSettings(name=self.hub_name, source_column=self.source, target_column=self.target)
        return read(hub, self.columns, seed)

    def _paired(self, folder: Path, split: str) -> Dataset:
        source = read_lines(folder, f"{split}.{self.source}")
        target = read_lines(folder, f"{split}.{self.target}")
        if len(source.lines) != len(target.lines):
            raise DataError(
                f"{source.path} has {len(source.lines)} lines, {target.path} has "
                f"{len(target.lines)}; line n of one must translate line n of the other"
            )
        rows = []
        for number, pair in enumerate(zip(source.lines, target.lines, strict=True), 1):
            left, right = map(str.strip, pair)
            if bool(left) != bool(right):
                blank = (target if left else source).at(number)
                raise DataError(f"{blank} is blank, its translation is not; fill it in")
            if left:
                rows.append({"source": left, "target": right})
        if not rows:
            raise DataError(f"{source.path} and {target.path} hold no text; a split needs one row")
        return Dataset.from_list(rows)
