"""What the scheduler sees in a round: clusters and channels as they are now."""

from dataclasses import dataclass

from collapipe.state import Channel, ClusterState


@dataclass(frozen=True, slots=True)
class World:
    """The N clusters in the units' order, and J channels, in one round."""

    clusters: tuple[ClusterState, ...]
    channels: tuple[Channel, ...]
