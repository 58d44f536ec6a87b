"""The configuration as typed, checked, frozen objects. Field names are the options' names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from collapipe.errors import ConfigError

_MONTH_S = 30 * 24 * 3600.0


def _check_numbers(group: str, section: Any, least: Mapping[str, float]) -> None:
    """Every number of ``section`` is finite, and not below what ``least`` says of it."""
    for field in fields(section):
        value, option = getattr(section, field.name), f"{group}.{field.name}".lstrip(".")
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{option}={value}: must be a finite number")
        if field.name in least and value < least[field.name]:
            raise ConfigError(f"{option}={value}: must be at least {least[field.name]:g}")


def _check_most(option: str, value: float, most: float) -> None:
    if value > most:
        raise ConfigError(f"{option}={value:g}: must be at most {most:g}")


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{option}={value:g}: must be above 0")


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option}={value}: must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class DataSettings:
    """Where rows come from. How they become shards is ``data.partitioner``, a plug-in.

    Attributes
    ----------
    root
        Folder with the files of a task's own format.
    name, config
        Dataset on the hub, and its configuration.
    train_file, validation_file, test_file
        A user's own files: CSV, TSV, JSON lines or text, plain or .gz.
    synthetic
        Take made-up rows.
    text_column, label_column, tokens_column, tags_column, source_column, target_column
        What the columns are called there; ``translation.de`` is a field of a column.
    shuffle
        Bring the training rows in a random order first: a file is often sorted.
    max_train_samples, max_eval_samples
        Take the first rows only.
    tokenizer
        Hub id or folder of a model whose tokeniser is used.
    """

    root: str | None = None
    name: str | None = None
    config: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    synthetic: bool = False
    text_column: str = "text"
    label_column: str = "label"
    tokens_column: str = "tokens"
    tags_column: str = "ner_tags"
    source_column: str = "source"
    target_column: str = "target"
    shuffle: bool = True
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        _check_numbers("data", self, {"max_train_samples": 1, "max_eval_samples": 1})
        given = [option for option in ("root", "name", "train_file") if getattr(self, option)]
        given += ["synthetic"] if self.synthetic else []
        if len(given) > 1:
            raise ConfigError(
                f"data.{given[0]} and data.{given[1]}: rows come from one of them; set the other "
                "to null"
            )
        for option in ("validation_file", "test_file"):
            if getattr(self, option) and not self.train_file:
                raise ConfigError(f"data.{option}: needs data.train_file beside it")

    def paths(self) -> dict[str, Path]:
        """The options that are set and name a folder or a file of this machine."""
        options = "root", "train_file", "validation_file", "test_file"
        return {option: Path(path) for option in options if (path := getattr(self, option))}


@dataclass(frozen=True)
class PipelineSettings:
    """How a cluster runs a batch."""

    num_segments: int | None = None
    num_micro_batches: int = 4
    schedule: str = "one_f_one_b"
    dtype: str = "float32"
    threads: int = 1
    profile: bool = False

    def __post_init__(self) -> None:
        _check_numbers("pipeline", self, dict.fromkeys(("num_segments", "num_micro_batches"), 1))
        _check_numbers("pipeline", self, {"threads": 1})
        _check_choice("pipeline.schedule", self.schedule, ("gpipe", "one_f_one_b"))
        _check_choice("pipeline.dtype", self.dtype, ("float32", "float64"))


@dataclass(frozen=True)
class OptimizerSettings:
    """The local optimiser, the same on every segment, the embedding and the head."""

    name: str = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay: str = "constant"
    clip_norm: float | None = 1.0
    state: str = "keep"

    def __post_init__(self) -> None:
        least = dict.fromkeys(("momentum", "beta1", "beta2", "weight_decay", "warmup_steps"), 0)
        _check_numbers("optimizer", self, least)
        for option in ("lr", "eps", "clip_norm"):
            _check_positive(f"optimizer.{option}", getattr(self, option))
        for option in ("momentum", "beta1", "beta2"):
            if getattr(self, option) >= 1:
                raise ConfigError(f"optimizer.{option}={getattr(self, option)}: must be below 1")
        _check_choice("optimizer.name", self.name, ("adamw", "sgd"))
        _check_choice("optimizer.decay", self.decay, ("constant", "linear", "inverse_sqrt"))
        _check_choice("optimizer.state", self.state, ("keep", "reset"))

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate η of global step ``step`` (from 0) of ``total_steps``."""
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.decay == "linear":
            return self.lr * (total_steps - step) / max(1, total_steps - warmup)
        if self.decay == "inverse_sqrt":
            return self.lr * math.sqrt(max(1, warmup) / (step + 1))
        return self.lr


@dataclass(frozen=True)
class ServerOptimizerSettings:
    """What the server does with the pseudo-gradient θ(t) − Σ wₙ θₙ."""

    name: str = "fedavg"
    lr: float = 1.0
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_numbers("server_optimizer", self, {"momentum": 0, "beta2": 0})
        for option in ("lr", "eps"):
            _check_positive(f"server_optimizer.{option}", getattr(self, option))
        for option in ("momentum", "beta2"):
            if getattr(self, option) >= 1:
                raise ConfigError(
                    f"server_optimizer.{option}={getattr(self, option)}: must be below 1"
                )
        choices = ("fedavg", "sgd", "momentum", "adam")
        _check_choice("server_optimizer.name", self.name, choices)


@dataclass(frozen=True)
class FederationSettings:
    """Rounds, units, and what becomes of their weights."""

    rounds: int = 10
    num_units: int = 3
    local_steps: int = 10
    eval_every: int = 1
    round_timeout_s: float = 600.0
    weighting: str = "tokens"
    on_infeasible: str = "stop"
    clock: str = "modelled"
    checkpoint_every: int = 5
    keep: int = 2
    channel_noise: float = 0.0

    def __post_init__(self) -> None:
        counts = ("rounds", "num_units", "local_steps", "eval_every", "keep")
        may_be_0 = ("checkpoint_every", "channel_noise")
        _check_numbers("federation", self, dict.fromkeys(counts, 1))
        _check_numbers("federation", self, dict.fromkeys(may_be_0, 0))
        _check_choice("federation.on_infeasible", self.on_infeasible, ("stop", "skip"))
        _check_choice("federation.clock", self.clock, ("modelled", "real"))
        _check_positive("federation.round_timeout_s", self.round_timeout_s)
        _check_most("federation.round_timeout_s", self.round_timeout_s, _MONTH_S)
        _check_choice("federation.weighting", self.weighting, ("tokens", "uniform"))

    @property
    def total_steps(self) -> int:
        """Global steps of the whole run."""
        return self.rounds * self.local_steps

    def steps_of(self, round_: int) -> range:
        """Global steps of a round, both counted as users see them: rounds from 1, steps from 0."""
        return range((round_ - 1) * self.local_steps, round_ * self.local_steps)


@dataclass(frozen=True)
class DecoderSettings:
    """Who trains the head within a round, and how."""

    mode: str = "per_cluster"

    def __post_init__(self) -> None:
        _check_choice("decoder.mode", self.mode, ("per_cluster", "shared", "control_unit"))


@dataclass(frozen=True)
class CompressionSettings:
    """In how many bits units send the weights that they trained, and activations."""

    upload: str = "float32"
    activation: str = "float32"

    def __post_init__(self) -> None:
        for option in ("upload", "activation"):
            _check_choice(
                f"compression.{option}", getattr(self, option), ("float32", "bfloat16", "int8")
            )


@dataclass(frozen=True)
class LinkSettings:
    """The decoder link: where the server listens, and the largest message that it takes."""

    host: str = "127.0.0.1"
    port: int = 0
    max_message_bytes: int = 256 * 2**20
    frame_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        _check_numbers("link", self, {"port": 0, "max_message_bytes": 2**16})
        _check_positive("link.frame_timeout_s", self.frame_timeout_s)
        _check_most("link.port", self.port, 65535)
        _check_most("link.max_message_bytes", self.max_message_bytes, 2**31 - 1)


@dataclass(frozen=True)
class FrameworkSettings:
    """Who trains what, and where.

    Attributes
    ----------
    name
        What the run is called.
    partition
        Solver of a cluster's partition that the framework prescribes, see ``optim.solvers``; None:
        the strategy's own.
    unsplit
        Each unit trains the whole model by itself; its devices share the batch.
    aggregate
        False: each unit keeps a model of its own.
    cut
        Encoder blocks that the units hold; the server trains the others with the head. None: all.
    train
        False: rounds are scheduled and their time is modelled, and nothing is trained.
    """

    name: str = "collapipe"
    partition: str | None = None
    unsplit: bool = False
    aggregate: bool = True
    cut: int | None = None
    train: bool = True

    def __post_init__(self) -> None:
        _check_numbers("framework", self, {"cut": 1})
        if self.unsplit and self.cut is not None:
            raise ConfigError(
                f"framework.cut={self.cut}: a unit that trains the whole model has no cut; "
                "set one of framework.unsplit and framework.cut"
            )


@dataclass(frozen=True)
class TrackingSettings:
    """Where curves go beside the run's folder: ``mlflow`` is a tracking URI."""

    mlflow: str | None = None


@dataclass(frozen=True)
class RuntimeSettings:
    """Where the apps run."""

    name: str = "local"

    def __post_init__(self) -> None:
        _check_choice("runtime.name", self.name, ("local", "simulation"))
