"""A corpus of parallel text: a file a language and split, or a dataset on the hub."""

import codecs
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, load_dataset

from collapipe.errors import ConfigError, DataError
from collapipe.tasks.task import Splits
from collapipe.tasks.translation import Translation


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
        Translation.__post_init__(self)  # super() does not work in a class with slots
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}; set two")

    def splits(self, seed: int) -> Splits:
        """Rows as the corpus orders them, whatever the seed; blank pairs are left out.

        Raises ``DataError`` for a folder, file or line that cannot be read or paired.
        """
        if self.root is None:
            return self._from_hub()
        folder = Path(self.root)
        if not folder.is_dir():
            raise DataError(f"{self.name}: there is no folder {folder}; correct data.root")
        train, validation, test = (
            _paired(_read(folder, split, self.source), _read(folder, split, self.target))
            for split in ("train", "valid", "test")
        )
        return Splits(train, validation, test)

    def _from_hub(self) -> Splits:
        languages = self.source, self.target
        try:
            hub = load_dataset(self.hub_name)
            sides = [
                [
                    _Side(f"{self.hub_name}:{split}.{name}", list(hub[split][name]))
                    for name in languages
                ]
                for split in ("train", "validation", "test")
            ]
        except Exception as error:  # no network, no such name, split or column: all kinds
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(
                f"{self.name}: cannot load {self.hub_name!r} from the hub ({cause}); "
                "set data.root=FOLDER to read it from files"
            ) from error
        train, validation, test = (_paired(source, target) for source, target in sides)
        return Splits(train, validation, test)


@dataclass(frozen=True, slots=True)
class _Side:
    """One language's lines and the name of the place they come from."""

    where: str
    lines: list[str]


def _read(folder: Path, split: str, language: str) -> _Side:
    names = f"{split}.{language}", f"{split}.{language}.gz"
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(f"{folder} has neither {names[0]} nor {names[1]}; add it, or set data.root")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch the file again") from error
    return _Side(str(path), _lines(path, content.removeprefix(codecs.BOM_UTF8)))


def _lines(path: Path, content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02x}"
        raise DataError(f"{path}:{line} is not UTF-8 ({byte}); convert the file") from error
    # Not splitlines(): it also breaks at characters that may stand inside a sentence.
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


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
