"""The source of rows, and on whose rows the model is evaluated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from collapipe.errors import ConfigError
from collapipe.sections.numbers import Count


@dataclass(frozen=True)
class DataSettings:
    """The source of rows. The plug-in ``data.partitioner`` divides them into shards.

    The defaults equal ``conf/data/default.yaml``; a task makes an object for its own hub data set.
    """

    root: str | None = None  # folder with the files of a task's own format
    name: str | None = None  # dataset on the hub
    config: str | None = None
    train_file: str | None = None  # CSV, TSV, JSON lines or text, plain or .gz
    validation_file: str | None = None
    test_file: str | None = None
    synthetic: bool = False
    text_column: str = "text"  # ``translation.de`` is a field of a column
    label_column: str = "label"
    tokens_column: str = "tokens"
    tags_column: str = "ner_tags"
    source_column: str = "source"
    target_column: str = "target"
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    shuffle: bool = True  # shuffle training rows first, because files are often sorted
    max_train_samples: Count | None = None  # the first rows only
    max_eval_samples: Count | None = None
    tokenizer: str | None = None  # hub id or folder of a model's, bytes, or federated
    tokenizer_min_rows: Count = 1  # a unit sends only words that at least this many rows contain

    def __post_init__(self) -> None:
        sources = ("root", "name", "train_file", "synthetic")
        given = [option for option in sources if getattr(self, option)]
        if len(given) > 1:
            raise ConfigError(
                f"data.{given[0]} and data.{given[1]}: rows come from one of them; set the other "
                "to null"
            )
        files = {option: getattr(self, option) for option in ("validation_file", "test_file")}
        for option in [option for option, file in files.items() if file]:
            if given and not self.train_file:
                raise ConfigError(f"data.{option}: needs data.train_file; set both")
            if not self.train_file and not all(files.values()):
                raise ConfigError(
                    f"data.{option}: needs data.train_file; if units have owners with rows, set "
                    "both data.validation_file and data.test_file instead"
                )

    @property
    def holds_out(self) -> bool:
        """Whether rows to evaluate on are drawn from a file of training rows."""
        return self.train_file is not None and None in (self.validation_file, self.test_file)

    @property
    def brought(self) -> bool:
        """Whether rows are a user's, with columns of any names."""
        return bool(self.name or self.train_file or self.validation_file)

    def paths(self) -> dict[str, Path]:
        """Return the options that name a folder or a file of this machine, if they are set."""
        options = "root", "train_file", "validation_file", "test_file"
        return {option: Path(path) for option in options if (path := getattr(self, option))}


@dataclass(frozen=True)
class EvaluationSettings:
    """On whose rows the model is evaluated: the server's, the units', or both.

    ``auto`` is ``server`` or ``units``, see ``on_rows_of``.
    """

    where: Literal["auto", "server", "units", "both"]

    def on_rows_of(self, data: DataSettings, trains: bool) -> "EvaluationSettings":
        """Resolve ``auto``: it is ``units`` if the server would have to draw rows from theirs."""
        if self.where != "auto":
            return self
        return EvaluationSettings("units" if trains and data.holds_out else "server")

    @property
    def on_server(self) -> bool:
        return self.where != "units"

    @property
    def on_units(self) -> bool:
        return self.where != "server"
