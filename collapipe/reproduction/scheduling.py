"""Runs of the scheduler alone, side by side: what ``collapipe run framework.train=false`` does.

Units report their clusters, the environment changes devices and channels, the strategy decides, and
its plan is verified and costed, all by the apps' own code. Runs of one seed see the same devices
and channels.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from client_app.cluster_state import cluster_state
from collapipe import config
from collapipe.config import Settings
from collapipe.runs.rows import build_tokenizer, load_shards, load_splits
from collapipe.state import ClusterState
from server_app.rounds.results import dry_run
from server_app.rounds.scheduler import Scheduler

EXPERIMENT = "experiment=fig11"
Overrides = Sequence[str]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round.

    Attributes
    ----------
    delay_s
        Of the slowest unit's pipeline and upload.
    pipelines_s
        Of each unit that took part.
    took_part
        Which of the N units did.
    largest_queue
        Of all units' Y_n after it; 0 where the strategy keeps none.
    over_limits
        How many units' plans exceed a device's memory or energy.
    """

    delay_s: float
    pipelines_s: tuple[float, ...]
    took_part: tuple[bool, ...]
    largest_queue: float
    over_limits: int


RunHistory = tuple[RoundResult, ...]


def run_histories(
    seed: int, rounds: int, worlds: Mapping[str, Overrides], strategies: Mapping[str, Overrides]
) -> dict[str, dict[str, RunHistory]]:
    """Each strategy's rounds in each world.

    Parameters
    ----------
    worlds, strategies
        What sets each apart from the experiment ``fig11``; a strategy's options are all under
        ``strategy``.
    """
    states = _cluster_states(seed, worlds)
    runs = {
        (world, strategy): _run(
            _with(_load((EXPERIMENT, *where)), seed, _load((EXPERIMENT, *how))),
            rounds,
            states[world],
        )
        for world, where in worlds.items()
        for strategy, how in strategies.items()
    }
    # Round by round: what all of them compute from the same devices is computed once.
    by_run = dict(zip(runs, zip(*zip(*runs.values(), strict=True), strict=True), strict=True))
    return {world: {each: by_run[world, each] for each in strategies} for world in worlds}


def _cluster_states(
    seed: int, worlds: Mapping[str, Overrides]
) -> dict[str, tuple[ClusterState, ...]]:
    """What control units report to the server in each world; their rows are the same in all."""
    base = _load((EXPERIMENT,))
    settings = _with(base, seed, base)
    tokenizer = build_tokenizer(settings, load_splits(settings).train)
    shards = [settings.task.encode(shard, tokenizer) for shard in load_shards(settings)]
    found = {}
    for world, where in worlds.items():
        own = _load((EXPERIMENT, *where))
        own = _with(own, seed, own)
        found[world] = tuple(
            cluster_state(own, unit, shards[unit], tokenizer.vocabulary)
            for unit in range(own.federation.num_units)
        )
    return found


def _run(settings: Settings, rounds: int, states: Sequence[ClusterState]) -> Iterator[RoundResult]:
    scheduler = Scheduler(settings, states)
    for each in dry_run(settings, scheduler, range(1, rounds + 1)):
        report = each.report
        yield RoundResult(
            report.cost.delay_s if report.cost else 0.0,
            tuple(cost.pipeline_s for cost in report.costs.values()),
            tuple(unit in report.units for unit in range(len(report.queues))),
            max(report.queues),
            sum(cluster.over_limits for cluster in report.plan.clusters),
        )


@functools.cache  # composing takes a good part of a second
def _load(options: tuple[str, ...]) -> Settings:
    return config.load_overrides(options)


def _with(world: Settings, seed: int, chosen: Settings) -> Settings:
    """``world`` with that seed, and the strategy of ``chosen``."""
    tree = {**world.tree, "seed": seed, "strategy": chosen.tree["strategy"]}
    return replace(world, seed=seed, tree=tree)
