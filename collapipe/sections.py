"""The configuration's sections as frozen, validated objects; fields have the options' names."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from collapipe.errors import ConfigError
from collapipe.plan import UplinkPlan
from collapipe.report import RoundingErrors
from collapipe.state import HopPrecision, Precision

_HOST_AND_PORT = re.compile(r"(\[.*\]|[^:]*):\d+")
_LEAST_ERROR = 1e-15  # a smaller ρ counts as 0
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6  # in clip norms; larger ones overflow privacy accounting
_MONTH_S = 30 * 24 * 3600.0
_WILDCARDS = "0.0.0.0", "::", "[::]"  # noqa: S104 - to refuse them as addresses to dial

Count = Annotated[int, Field(ge=1, lt=2**63)]
CountFrom0 = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PrecisionOrAuto = Literal[Precision, "auto"]


def _kind_of_device(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", name) is None:
        raise ValueError("must be one of auto, cpu, cuda, cuda:NUMBER, mps")
    return name


# see ``collapipe.process.torch_device``
TorchDevice = Annotated[str, AfterValidator(_kind_of_device)]


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
class PipelineSettings:
    """How a cluster runs a batch."""

    num_segments: Count | None
    num_micro_batches: Count
    schedule: Literal["gpipe", "one_f_one_b", "auto"]
    dtype: Literal["float32", "float64"]
    threads: Count | None
    profile: bool | None
    keep_shares: bool
    replicate_every: CountFrom0 | Literal["auto"]
    relay: bool
    wire_dtype: HopPrecision
    recompute: bool | Literal["auto"]


@dataclass(frozen=True)
class OptimizerSettings:
    """The local optimiser, the same on every segment, the embedding and the head."""

    name: Literal["adamw", "sgd"]
    lr: Positive
    momentum: Share
    beta1: Share
    beta2: Share
    eps: Positive
    weight_decay: NotNegative
    warmup_steps: CountFrom0
    decay: Literal["constant", "linear", "inverse_sqrt"]
    clip_norm: Positive | None
    state: Literal["keep", "reset"]

    def rate(self, step: int, total_steps: int) -> float:
        """Return the learning rate η of global step ``step`` (from 0) of ``total_steps``."""
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
    """How the server averages updates, and its step with the pseudo-gradient θ(t) − Σ wₙ θₙ.

    ``median`` and ``trimmed_mean`` apply to each weight separately and weigh all units equally.
    ``trim`` is the fraction of units that a trimmed mean leaves out at each end.
    """

    name: Literal["fedavg", "sgd", "momentum", "adam"]
    lr: Positive
    momentum: Share
    beta2: Share
    eps: Positive
    average: Literal["mean", "median", "trimmed_mean"]
    trim: Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True)
class FederationSettings:
    """Rounds, units, and the aggregation of their weights."""

    rounds: Count
    num_units: Count
    min_units: Count | None
    wait_s: NotNegative
    miss_limit: Count
    local_steps: Count
    eval_every: Count
    round_timeout_s: Annotated[float, Field(gt=0, le=_MONTH_S)]
    weighting: Literal["tokens", "uniform"]
    on_infeasible: Literal["stop", "skip"]
    clock: Literal["modelled", "real"]
    checkpoint_every: CountFrom0
    keep: Count
    channel_noise: NotNegative
    max_update_norm: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    max_share: Annotated[float, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.min_units is not None and self.min_units > self.num_units:
            raise ConfigError(
                f"federation.min_units={self.min_units}: more than federation.num_units="
                f"{self.num_units}, which is how many there may be; lower it"
            )

    @property
    def total_steps(self) -> int:
        """Number of global steps of the whole run."""
        return self.rounds * self.local_steps

    def steps_of(self, round_: int) -> range:
        """Return the global steps of a round; rounds count from 1, steps from 0."""
        return range((round_ - 1) * self.local_steps, round_ * self.local_steps)


@dataclass(frozen=True)
class DecoderSettings:
    """Where and how heads train within a round.

    With ``auto`` the scheduler chooses server or control unit, for each unit and round.
    """

    mode: Literal["per_cluster", "shared", "control_unit", "auto"]


@dataclass(frozen=True)
class CompressionSettings:
    """Precisions of the units' uploads and activations, and of the server's gradients.

    With ``auto`` the scheduler chooses a precision for each unit and round. With ``feedback``, the
    change of a row's activation since it was last sent is sent, if it is smaller.
    """

    upload: PrecisionOrAuto
    activation: PrecisionOrAuto
    gradient: Precision
    feedback: bool

    @property
    def decided(self) -> bool:
        """Whether the scheduler chooses a precision."""
        return "auto" in (self.upload, self.activation)

    def of(self, uplink: UplinkPlan | None) -> "CompressionSettings":
        """Return these settings with a unit's precisions in a round, if its plan has some."""
        if uplink is None or uplink.activation is None or uplink.upload is None:
            return self
        return replace(self, upload=uplink.upload, activation=uplink.activation)

    def rounding_error(
        self, activation: Precision, upload: Precision, errors: RoundingErrors
    ) -> float:
        """Return ρ, the relative rounding error of messages in these precisions, at most 1.

        It is the sum of the errors of activations and uploads. An upload's error counts although
        error feedback corrects it later. Precisions that the scheduler does not choose count as
        exact, and so do errors too small for float32. Sending nothing has ρ = 1.
        """
        of_activation = errors.activation[activation] if self.activation == "auto" else 0.0
        of_upload = errors.upload[upload] if self.upload == "auto" else 0.0
        error = min(of_activation + of_upload, 1.0)
        return error if error > _LEAST_ERROR else 0.0


@dataclass(frozen=True)
class PrivacySettings:
    """How much the model may reveal about a single unit, see ``collapipe.privacy``.

    A unit's update is clipped to the norm ``clip_norm`` C. With ``clip_quantile``, C starts there
    and follows the units' norms. The server adds noise of standard deviation
    ``noise_multiplier``·C to the sum of updates, drawn from ``noise_seed`` if it is set.

    With ``secure_aggregation`` the server learns only the sum, see
    ``collapipe.secure_aggregation``. The fraction ``threshold`` of a round's units must finish.
    With ``noise_by=units`` the units add the noise in parts, so that the server never learns a sum
    without noise.
    """

    clip_norm: Positive | None
    clip_quantile: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None
    noise_multiplier: Annotated[float, Field(ge=0, le=_MOST_NOISE, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    max_epsilon: Positive | None
    noise_seed: CountFrom0 | None
    noise_by: Literal["server", "units"]
    secure_aggregation: bool
    threshold: Annotated[float, Field(gt=0.5, le=1, allow_inf_nan=False)]

    def __post_init__(self) -> None:
        if 0 < self.noise_multiplier < _LEAST_NOISE:
            raise ConfigError(
                f"privacy.noise_multiplier={self.noise_multiplier:g}: too small to protect anyone; "
                f"set 0 for no noise, or {_LEAST_NOISE:g} … {_MOST_NOISE:g}"
            )
        for option in ("noise_multiplier", "clip_quantile"):
            if getattr(self, option) and self.clip_norm is None:
                raise ConfigError(
                    f"privacy.{option}={getattr(self, option):g}: needs a bound on what a unit "
                    "changes; set privacy.clip_norm"
                )
        if self.secure_aggregation and self.clip_norm is None:
            raise ConfigError(
                "privacy.secure_aggregation=true: masking needs bounded updates; set "
                "privacy.clip_norm"
            )
        if self.noise_by == "units" and not (self.secure_aggregation and self.noise_multiplier):
            raise ConfigError(
                "privacy.noise_by=units: each unit's part of the noise hides nothing alone; set "
                "privacy.secure_aggregation=true and privacy.noise_multiplier, or noise_by=server"
            )
        if self.secure_aggregation and self.clip_quantile is not None:
            raise ConfigError(
                f"privacy.clip_quantile={self.clip_quantile:g}: in a masked sum a unit's vote "
                "cannot be checked, so one unit could set any clip norm; set it to null, or "
                "privacy.secure_aggregation=false"
            )
        if self.max_epsilon is not None and not self.noise_multiplier:
            raise ConfigError(
                f"privacy.max_epsilon={self.max_epsilon:g}: without noise every round exceeds it; "
                "set privacy.noise_multiplier"
            )


@dataclass(frozen=True)
class AdapterSettings:
    """What trains: all weights (``none``), or adapters of frozen weights (``lora``)."""

    name: Literal["none", "lora"]


@dataclass(frozen=True)
class LoraSettings(AdapterSettings):
    """Adapters of rank r and weight α; ``dropout`` is the probability that an input is dropped.

    ``target_modules`` are the last parts of linear layers' names; None: peft's defaults for the
    family. With ``last_blocks`` everything before these blocks is frozen. ``cache`` then stores the
    frozen part's activations of rows, at most ``cache_bytes``. With ``rslora`` adapters count
    α / √r instead of α / r. ``path`` is a folder of peft with the first adapters.
    """

    rank: Count
    alpha: Positive
    dropout: Share
    target_modules: tuple[str, ...] | None
    last_blocks: Count | None
    cache: bool
    cache_bytes: Count
    rslora: bool
    path: str | None

    def __post_init__(self) -> None:
        if self.cache and self.last_blocks is None:
            raise ConfigError(
                "adapter.cache=true: with adapter.last_blocks=null every block trains, and no "
                "activation stays the same; set adapter.last_blocks below model.num_blocks, or "
                "adapter.cache=false"
            )


@dataclass(frozen=True)
class LinkSettings:
    """The decoder link: the server's addresses to listen and to dial, limits and timeouts."""

    host: str
    port: Annotated[int, Field(ge=0, le=65535)]
    advertise: str | None
    max_message_bytes: Annotated[int, Field(ge=2**16, lt=2**31)]
    frame_timeout_s: Positive
    reconnect_s: NotNegative

    def __post_init__(self) -> None:
        if self.host in _WILDCARDS and self.advertise is None:
            raise ConfigError(
                f"link.host={self.host}: listens on all addresses, so units need one to dial; set "
                "link.advertise to an address that they reach, as HOST or HOST:PORT"
            )

    def dialled(self, port: int) -> str:
        """Return the address that units dial if the server listens on ``port``."""
        host = self.advertise or self.host
        return host if _HOST_AND_PORT.fullmatch(host) else address(host, port)


def address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class FrameworkSettings:
    """Which parts of the model train where, and whether units' models are averaged."""

    name: str
    partition: str | None  # a solver of ``optim.solvers``; None: the strategy's solver
    unsplit: bool  # each unit trains the whole model itself; its devices share the batch
    aggregate: bool  # False: each unit keeps a separate model
    cut: Count | None  # number of blocks on units; others train on the server; None: all on units
    train: bool  # False: rounds are only scheduled and their time is modelled

    def __post_init__(self) -> None:
        if self.unsplit and self.cut is not None:
            raise ConfigError(
                f"framework.cut={self.cut}: a unit that trains the whole model has no cut; "
                "set one of framework.unsplit and framework.cut"
            )


@dataclass(frozen=True)
class TrackingSettings:
    """Where curves are sent in addition to the run's folder; ``mlflow`` is a tracking URI."""

    mlflow: str | None


@dataclass(frozen=True)
class RuntimeSettings:
    """Where the apps run, and the torch device of control units."""

    name: Literal["local", "simulation", "deployment"]
    torch_device: TorchDevice
    federation: str | None = None  # only for a deployment

    def __post_init__(self) -> None:
        if self.name == "deployment" and self.federation is None:
            raise ConfigError(
                "runtime.federation=null: a deployment needs the folder of collapipe deploy init, "
                "or a name of Flower's configuration"
            )


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


@dataclass(frozen=True)
class ServerSettings:
    """The torch device on which the server trains heads and evaluates."""

    torch_device: TorchDevice
