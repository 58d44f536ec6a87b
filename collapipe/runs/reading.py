"""Read a run's folder, also during the run or after a failure."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from collapipe.config.resolved import value_at
from collapipe.config.trust import read_tree, version_of
from collapipe.errors import ConfigError, printable, unit_called
from collapipe.formatting import counted, seconds
from collapipe.report import Count, RoundReport, Score
from collapipe.runs.checked_json import checked, text_of, valid
from collapipe.runs.folder import check_there

T = TypeVar("T")
NO_UPLOADS = "uploads not counted"
SOME_UPLOADS = "uploads counted in some rounds only"
_CHECKPOINT = re.compile(r"[0-9]{6,}")
_OUTPUTS = Path("outputs")


@dataclass(frozen=True, slots=True)
class Summary:
    """The part of ``summary.json`` that is read again."""

    status: str
    error: str | None = None
    rounds_completed: int | None = None
    rounds_skipped: int = 0
    metric: Score | None = None
    test_loss: float | None = None
    wall_s: float | None = None
    bytes_down: Count = 0  # in rounds, and before and between them

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def cause(self) -> str:
        """``: ERROR`` if there was an error that differs from the status, else empty."""
        error = self.error if self.error != self.status else None
        return f": {printable(error)}" if error else ""


@dataclass(frozen=True)
class Run:
    """A run's folder.

    ``tree`` is the resolved configuration. A run in progress, or one that was killed, has no
    ``summary``. ``shard_rows`` maps units to numbers of rows; it is empty if the run ended before
    that. ``choices`` maps each group of options to its file in ``conf/``.
    """

    folder: Path
    version: str
    config_text: str
    tree: Mapping[str, Any]
    rounds: tuple[RoundReport, ...]
    summary: Summary | None
    shard_rows: dict[int, int]
    choices: dict[str, str]
    names: dict[int, str] = field(default_factory=dict)  # of units, if their owners named them
    predicts_labels: bool = False  # or else tokens

    def called(self, unit: int) -> str:
        """Return a unit's name, or a text such as ``unit 0``."""
        return unit_called(unit, self.names.get(unit, ""))

    @property
    def num_units(self) -> int:
        return int(self.tree["federation"]["num_units"])

    @property
    def planned_rounds(self) -> int:
        return int(self.tree["federation"]["rounds"])

    @property
    def seed(self) -> int:
        return int(self.tree["seed"])

    @property
    def keeps_queues(self) -> bool:
        """Whether the strategy keeps queues; if not, the rounds' queues are 0."""
        return any(line.plan.queues for line in self.rounds)

    @property
    def trained(self) -> bool:
        """Whether units trained; if not, rounds were only scheduled."""
        return any("train" in line.seconds for line in self.rounds)

    @property
    def clock_kind(self) -> str:
        """The kind of the run's clock: ``modelled`` or ``measured``."""
        return "measured" if self.tree["federation"]["clock"] == "real" else "modelled"

    @property
    def missing_uploads(self) -> str:
        """Note for the run's modelled seconds and joules; empty if they include all uploads.

        Uploads are missing if the strategy plans no channels.
        """
        planned = [line.costs.values() for line in self.rounds if line.costs]
        held = [all(cost.upload_s is not None for cost in costs) for costs in planned]
        return "" if all(held) else SOME_UPLOADS if any(held) else NO_UPLOADS

    @property
    def missing_in_clock(self) -> str:
        """Note for the run's clock; a measured clock needs none."""
        return self.missing_uploads if self.clock_kind == "modelled" else ""

    @property
    def clock_text(self) -> str:
        """Time at which the last round ended, with its kind and notes; empty before that."""
        if not self.rounds:
            return ""
        parts = (seconds(self.rounds[-1].clock_s), self.clock_kind, self.missing_in_clock)
        return ", ".join(filter(None, parts))

    def option(self, name: str) -> object:
        """Return a value of the configuration; None if there is no such option."""
        return value_at(self.tree, name)


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises ``ConfigError`` with the file, the line and the problem."""
    config = folder / "config.yaml"
    check_there(folder)
    if not config.is_file():
        jobs = sorted(each.parent for each in folder.glob("[0-9]*/config.yaml"))
        way_out = f"name the runs of this sweep, such as {jobs[0]}" if jobs else "name another one"
        raise ConfigError(
            f"{folder}: not the folder of a run, {config} is missing; a run writes it when it "
            f"starts, so {way_out}"
        )
    text, tree = read_tree(config)
    num_units = valid(_TREE, str(config), tree).federation.num_units
    summary = read_summary(folder)  # first: it is written after all rounds
    rounds = tuple(_rounds(folder / "metrics.jsonl", num_units))
    _check_complete(folder, summary, len(rounds))
    shards = read_shards(folder)
    choices = _read(_CHOICES, folder / "choices.json")
    if choices is None:
        raise ConfigError(f"{folder / 'choices.json'}: is missing; restore it")
    return Run(
        folder=folder,
        version=version_of(text),
        config_text=text,
        tree=tree,
        rounds=rounds,
        summary=summary,
        shard_rows={shard.unit: shard.rows for shard in shards.shards},
        choices=choices,
        names={shard.unit: shard.name for shard in shards.shards if shard.name},
        predicts_labels=bool(shards.labels),
    )


def reported_labels(run_dir: Path) -> Counter[str]:
    """Return how many training rows of each label all units reported; empty if the run ended
    before that. Raises ``ConfigError`` for an invalid file."""
    return sum((Counter(shard.labels) for shard in read_shards(run_dir).shards), Counter[str]())


def latest_run() -> Path:
    """Return the folder below ``./outputs`` of the run that last began or ended a round.

    Raises ``ConfigError`` if there is no run.
    """
    last = {
        config.parent: max(map(modified_s, (config, config.with_name("metrics.jsonl"))))
        for config in _OUTPUTS.rglob("config.yaml")
        if config.with_name("overrides.json").is_file()
    }
    if not last:
        raise ConfigError(f"{_OUTPUTS.absolute()}: holds no run; name the folder of a run")
    return max(last, key=last.__getitem__)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of the existing checkpoints, which are named by their rounds, oldest
    first."""
    found = (run_dir / "checkpoints").glob("*")
    named = (path for path in found if _CHECKPOINT.fullmatch(path.name))
    return sorted(named, key=lambda path: int(path.name))


def how_to_go_on(run_dir: Path, command: str | None = None) -> str:
    """Return what to do after a run that ended early: the ``command`` that resumes it, if it has a
    checkpoint."""
    if not (found := checkpoints(run_dir)):
        return "it has no checkpoint (see federation.checkpoint_every): begin a new run"
    command = command or shlex.join(["collapipe", "resume", str(run_dir)])
    return printable(f"go on after round {int(found[-1].name)} with: {command}")


def modified_s(file: Path) -> float:
    """Return the time at which a file was last written, as ``time.time``; 0 if it is missing."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


_MOST_UNITS, _MOST_MICRO_BATCHES = 100_000, 2**16  # a row or a box is drawn for each
_Whole = Annotated[int, Field(strict=True, ge=0)]


class _Federation(BaseModel):
    num_units: Annotated[_Whole, Field(le=_MOST_UNITS)]
    rounds: _Whole
    clock: Literal["modelled", "real"]


class _Tree(BaseModel):
    federation: _Federation
    seed: _Whole


class _Shard(BaseModel):
    unit: int
    rows: int
    labels: dict[str, _Whole] = {}
    name: str = ""
    joined: int | None = None  # its first round, if it joined during the run


class _Shards(BaseModel):
    shards: list[_Shard]
    labels: list[str] = []


_LINE, _SUMMARY, _SHARDS = TypeAdapter(RoundReport), TypeAdapter(Summary), TypeAdapter(_Shards)
_CHOICES, _TREE = TypeAdapter(dict[str, str]), TypeAdapter(_Tree)


def _read(kind: TypeAdapter[T], file: Path) -> T | None:
    """Return a small file's validated content; None if the file is missing."""
    return checked(kind, file, 0, text_of(file)) if file.is_file() else None


def read_summary(run_dir: Path) -> Summary | None:
    """Return the run's summary, None before it ends. Raises ``ConfigError`` for an invalid file."""
    return _read(_SUMMARY, run_dir / "summary.json")


def read_shards(run_dir: Path) -> _Shards:
    """Return the units' reports about their rows; none before the run has them. Raises
    ``ConfigError`` for an invalid file."""
    return _read(_SHARDS, run_dir / "shards.json") or _Shards(shards=[])


def _rounds(file: Path, num_units: int) -> Iterator[RoundReport]:
    """Yield the rounds in a file; an incomplete last line is ignored."""
    if not file.is_file():
        return
    last = 0
    for number, text in enumerate(text_of(file).split("\n")[:-1], 1):
        line = checked(_LINE, file, number, text)
        for why in _contradictions(line, last, num_units):
            raise ConfigError(f"{file}:{number}: {why}")
        last = line.round
        yield line


def _check_complete(folder: Path, summary: Summary | None, found: int) -> None:
    """Raise ``ConfigError`` if a completed run had another number of rounds than ``found``."""
    had = summary.rounds_completed if summary and summary.completed else None
    if had is not None and had != found:
        raise ConfigError(
            f"{folder / 'metrics.jsonl'}: has {counted(found, 'round')}, summary.json counts "
            f"{had}; restore the file"
        )


def _contradictions(line: RoundReport, last: int, num_units: int) -> Iterator[str]:
    if line.round <= last:
        yield f"round {line.round} after round {last}; rounds follow each other"
    if line.round > last + 1:
        yield f"round {line.round} after round {last}; the rounds between them are missing"
    planned = (cluster.unit for cluster in line.plan.clusters)
    for unit in (*planned, *line.units, *line.failures, *line.excluded, *line.costs):
        if not 0 <= unit < num_units:
            yield f"unit {unit}; federation.num_units={num_units}"
    if any(each.num_micro_batches > _MOST_MICRO_BATCHES for each in line.plan.clusters):
        yield f"more than {_MOST_MICRO_BATCHES:,} micro-batches"
    for name, values in (("queues", line.queues), ("plan.gammas", line.plan.gammas)):
        if len(values) not in (0, num_units):
            yield f"{name}: {len(values)}; federation.num_units={num_units}"
