"""What trains and how: the model's split, a cluster's pipeline, optimiser and adapters."""

import math
from dataclasses import dataclass
from typing import Literal

from collapipe.errors import ConfigError
from collapipe.sections.numbers import Count, CountFrom0, MicroBatches, NotNegative, Positive, Share
from collapipe.state import HopPrecision


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
class PipelineSettings:
    """How a cluster runs a batch."""

    num_segments: Count | None
    num_micro_batches: MicroBatches
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
        """Return the learning rate η of global step ``step`` (from 0) of ``total_steps``.

        A linear decay stays at 0 from ``total_steps`` on; below 0, steps would unlearn their rows.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.decay == "linear":
            return self.lr * max(0, total_steps - step) / max(1, total_steps - warmup)
        if self.decay == "inverse_sqrt":
            return self.lr * math.sqrt(max(1, warmup) / (step + 1))
        return self.lr


@dataclass(frozen=True)
class DecoderSettings:
    """Where and how heads train within a round.

    With ``auto`` the scheduler chooses server or control unit, for each unit and round.
    """

    mode: Literal["per_cluster", "shared", "control_unit", "auto"]


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
