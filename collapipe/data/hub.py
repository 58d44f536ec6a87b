"""Load a data set of the hub, or a folder with the same layout, without running its code."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import datasets
from datasets import Dataset, DatasetBuilder, load_dataset_builder
from datasets.config import REPOCARD_FILENAME, REPOYAML_FILENAME
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from huggingface_hub import DatasetCard, constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from yaml import safe_load

from collapipe.errors import ConfigError, DataError, one_line
from collapipe.hub import hub_silence

_log = logging.getLogger(__name__)
Opened: TypeAlias = Callable[[], Dataset]
_ID = re.compile(r"(?!buckets/)(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_SAFE = Arrow, Cache, Csv, Json, Parquet, Text  # other builders unpickle, or open files of any kind
_turns = threading.Lock()
_MOST_FILES = 200_000  # datasets searches a folder tens of times
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


def hub_rows(name: str, config: str | None, label: str | None) -> dict[str, Opened]:
    """Return the rows of each split of ``data.name``, an id of the hub or a folder.

    Splits whose labels (column ``label``) are all secret are left out. To check this, validation
    and test splits are opened, but not the training split.

    Raises ``ConfigError`` for an invalid name or a data set that could run code, and ``DataError``
    if it cannot be read or has no training rows.
    """
    hub = load(_place(name), name, config)
    there = {
        split: hub[each]
        for split, names in _SPLITS.items()
        for each in names[::-1]  # the first name wins
        if each in hub
    }
    if "train" not in there:
        raise DataError(
            f"{name}: has no split train, only {', '.join(hub)}; choose another data.config, or "
            "write its rows to a file and set data.train_file=FILE"
        )
    secret = [split for split in there if split != "train" and _is_secret(there[split](), label)]
    for split in secret:
        _log.warning("%s: %s has no labels, they are kept secret, and is not used", name, split)
    return {split: rows for split, rows in there.items() if split not in secret}


def load(place: str, name: str, config: str | None) -> dict[str, Opened]:
    """Download and prepare the data set at ``place``, and return functions that open its splits.

    Messages use ``name`` for the data set.
    """
    silence = hub_silence(name, "dataset") if place.startswith("hf://") else ""
    with _data_errors(name, silence), _offline(bool(silence)):
        _check_card(place, name)
        builder = load_dataset_builder(place, config)
        if not isinstance(builder, _SAFE):
            kinds = ", ".join(kind.__name__ for kind in _SAFE if kind is not Cache)
            raise ConfigError(
                f"data.name={name}: format {type(builder).__name__} is not read; save as {kinds}"
            )
        builder.download_and_prepare()
        return {str(split): partial(_opened, builder, split, name) for split in builder.info.splits}


@contextmanager
def _offline(silent: bool) -> Iterator[None]:
    """Use the cache alone if the hub is ``silent``: its libraries would try again for minutes.

    Their settings are the process's, so units that read rows at the same time take turns.
    """
    with _turns:
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        offline = (each or silent for each in before)
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _opened(builder: DatasetBuilder, split: str, name: str) -> Dataset:
    with _data_errors(name):
        return builder.as_dataset(split)


@contextmanager
def _data_errors(name: str, silence: str = "") -> Iterator[None]:
    """Convert the library's errors into ``DataError``, with why the hub was not asked."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # not in the cache, unknown name or configuration: many classes
        cause = silence or f"{type(error).__name__}: {one_line(error)}"
        raise DataError(
            f"data.name={name}: cannot be loaded ({cause}); "
            "correct data.name and data.config, or set data.root=FOLDER or data.train_file=FILE to "
            "read rows from files"
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of an id of the hub: ``owner/name`` or only a name."""
    return _ID.fullmatch(name) is not None


def _place(name: str) -> str:
    """Return a path or URL with which ``load_dataset_builder`` finds exactly ``name``.

    Names of the library's builders are refused: these would read files of the current folder, and
    ``pandas`` would unpickle them. Raises ``ConfigError`` for an invalid name.
    """
    if name not in _PACKAGED_DATASETS_MODULES and "::" not in name:
        if (folder := Path(name)).is_dir():
            if sum(1 for _ in islice(folder.rglob("*"), _MOST_FILES)) == _MOST_FILES:
                raise ConfigError(
                    f"data.name={name}: holds {_MOST_FILES:,} files and folders or more; name the "
                    "folder of the dataset alone"
                )
            return str(folder.resolve())
        if is_hub_id(name):
            return f"hf://datasets/{name}"
    raise ConfigError(
        f"data.name={name}: must be an id of the hub such as owner/name, or a folder such as "
        f"./{Path(name).name or 'rows'}"
    )


def _check_card(place: str, name: str) -> None:
    """Raise ``ConfigError`` if a card's configurations name files of other file systems.
    ``reference://`` fills in templates, which can run any code."""
    for file in (REPOCARD_FILENAME, REPOYAML_FILENAME):
        if (path := _fetch(place, file)) is None:
            continue
        card = file == REPOCARD_FILENAME
        data = DatasetCard.load(path).data.to_dict() if card else safe_load(path.read_text("utf-8"))
        for text in _texts((data or {}).get("configs")):
            if "::" in text or "://" in text:
                raise ConfigError(
                    f"data.name={name}: its {file} names {text[:80]!r}, which is outside the data "
                    "set; remove it from there"
                )


def _texts(tree: object) -> Iterator[str]:
    """Yield all keys and values of a tree as texts."""
    if isinstance(tree, Mapping | list | tuple | set):
        for each in tree.items() if isinstance(tree, Mapping) else tree:
            yield from _texts(each)
    else:
        yield str(tree)


def _fetch(place: str, file: str) -> Path | None:
    if not place.startswith("hf://"):
        return path if (path := Path(place, file)).exists() else None
    try:
        id_ = place.removeprefix("hf://datasets/")
        return Path(hf_hub_download(id_, file, repo_type="dataset"))
    except EntryNotFoundError:  # missing in the data set, or offline in the cache
        return None


def _is_secret(rows: Dataset, label: str | None) -> bool:
    """Whether every label is -1, the hub's mark for secret labels of a contest."""
    flat = rows.flatten()
    return label in flat.column_names and all(value in (-1, None) for value in flat[label][:])
