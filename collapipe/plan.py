"""What shall happen: frozen plans, the only thing that passes from deciding to doing."""

from dataclasses import dataclass

from collapipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive encoder blocks, ``first`` … ``first + blocks - 1`` (δ_k blocks)."""

    first: int
    blocks: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.blocks < 1:
            raise ConfigError(
                f"a span of {self.blocks} blocks from block {self.first} is impossible; "
                "a segment holds at least one block"
            )

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.first + self.blocks

    def indices(self) -> range:
        """The blocks' places in the whole encoder."""
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment s of the encoder and the device that holds it."""

    device: str
    span: Span


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What one cluster does in one round.

    Attributes
    ----------
    unit
        Number n of the cluster's control unit.
    segments
        The S segments in the order in which activations pass them; contiguous from block 0.
    num_micro_batches
        m; a batch of fewer samples is cut into as many micro-batches as it has samples.
    schedule
        Name of the pipeline's schedule, ``gpipe`` or ``one_f_one_b``.
    """

    unit: int
    segments: tuple[SegmentPlan, ...]
    num_micro_batches: int
    schedule: str

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ConfigError(
                f"unit {self.unit}: {self.num_micro_batches} micro-batches; at least 1"
            )
        expected = 0
        for segment in self.segments:
            if segment.span.first != expected:
                raise ConfigError(
                    f"unit {self.unit}: segment on {segment.device} starts at block "
                    f"{segment.span.first}, expected {expected}; segments follow each other"
                )
            expected = segment.span.stop


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one round t does: a plan for every scheduled unit, in the units' order."""

    round: int
    clusters: tuple[ClusterPlan, ...]
