"""Rounds of CollaPipe and of what it is compared with, on the same clusters.

N clusters are drawn anew in every round. A round counts the mean of its clusters' times, and apart
from that what each cluster's control unit uploads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from collapipe.reproduction.worlds import paper_world, problem, solved, solved_or_unlimited, stream
from optim.problem import ClusterSolver
from optim.radio.channel import links, power_limits, uplink_rate, upload_time
from optim.solvers import cluster_solver

ROUNDS = 20
CLUSTERS = 3  # N
OWN, BLIND = "exact", "no_segment_scheduling"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Method:
    """What it is called, and what its control units upload: activations, adapters or both."""

    label: str
    solve: ClusterSolver
    activations: bool = True
    adapters: bool = True


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        OWN: Method("CollaPipe", cluster_solver(OWN)),
        "vanilla_fl": Method("VanillaFL", cluster_solver("vanilla_fl"), activations=False),
        "pipeline": Method("PipeLine", cluster_solver("pipeline"), adapters=False),
        "titanic": Method("TITANIC", cluster_solver("titanic")),
        BLIND: Method("CollaPipe w/o SS", cluster_solver(BLIND)),
        "gpipe": Method("GPipe, even split", cluster_solver("gpipe")),
        "pipedream": Method("PipeDream, FTPipeHD", cluster_solver("pipedream")),
        "pipeedge": Method("PipeEdge", cluster_solver("pipeedge")),
    }
)
"""Ours first. "w/o SS" is the paper's short for: without segment scheduling."""
OTHERS = tuple(METHODS)[1:]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one seed's rounds take.

    Attributes
    ----------
    devices_s, slowest_s
        Mean and largest time of each round's clusters on their devices, by method.
    activations_s, adapters_s
        Mean of each round's uploads.
    broken
        Clusters whose limits of memory or energy the method exceeds, by method.
    """

    devices_s: Mapping[str, Floats]
    slowest_s: Mapping[str, Floats]
    activations_s: Floats
    adapters_s: Floats
    broken: Mapping[str, int]

    def uploads_s(self, method: str) -> Floats:
        """Mean upload of each round."""
        each = METHODS[method]
        return self.activations_s * each.activations + self.adapters_s * each.adapters

    def on_devices(self, method: str) -> float:
        """Total of all rounds, s."""
        return float(self.devices_s[method].sum())

    def of_slowest(self, method: str) -> float:
        """Total where the slowest cluster decides how long a round takes, s."""
        return float(self.slowest_s[method].sum())

    def with_uploads(self, method: str) -> float:
        """Total of devices and uploads, s."""
        return self.on_devices(method) + float(self.uploads_s(method).sum())


def sample(seed: int, num_blocks: int) -> Sample:
    """One seed's rounds, for an encoder of ``num_blocks``."""
    times = {method: np.empty((ROUNDS, CLUSTERS)) for method in METHODS}
    broken = dict.fromkeys(METHODS, 0)
    for method, seconds in times.items():
        for place in np.ndindex(ROUNDS, CLUSTERS):
            seconds[place], breaks = _on_devices(method, num_blocks, seed, place)
            broken[method] += breaks
    activations, adapters = np.array([_uploads(seed, number) for number in range(ROUNDS)]).T
    return Sample(
        {method: seconds.mean(axis=1) for method, seconds in times.items()},
        {method: seconds.max(axis=1) for method, seconds in times.items()},
        activations,
        adapters,
        broken,
    )


def _on_devices(
    method: str, num_blocks: int, seed: int, place: tuple[int, ...]
) -> tuple[float, bool]:
    """Seconds of a batch, and whether the method exceeds a limit."""
    cluster = problem(paper_world().devices(seed, *place), num_blocks)
    rng, solve = stream(seed, method, *place), METHODS[method].solve
    if method == OWN:
        return solved(solve, cluster, rng).best.latency_s, False
    solution, breaks = solved_or_unlimited(solve, cluster, rng)
    return solution.best.latency_s, breaks


def _uploads(seed: int, round_number: int) -> tuple[float, float]:
    """Mean seconds of a batch's activations, and of the adapters; unit n has channel n."""
    channels, uplinks = paper_world().radio(seed, CLUSTERS, round_number)
    pairs = links(uplinks, channels, "none")
    power = power_limits(pairs)
    rates = uplink_rate(power, pairs.gains, pairs.bandwidth_hz, pairs.noise_w, pairs.fading)
    own, adapters = np.diagonal(rates), pairs.model_bits[:, 0]
    activations = upload_time(pairs.upload_bits[:, 0] - adapters, own)
    return float(activations.mean()), float(upload_time(adapters, own).mean())
