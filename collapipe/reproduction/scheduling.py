"""Runs of the scheduler alone, side by side: what ``collapipe run framework.train=false`` does.

Units report their clusters, the environment changes devices and channels, the strategy decides, and
its plan is verified and costed, all by the apps' own code. Runs of one seed see the same devices
and channels.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from client_app.cluster_state import cluster_state
from collapipe import config
from collapipe.config import Settings
from collapipe.runs.evidence import Interval, over_seeds
from collapipe.runs.rows import build_tokenizer, load_shards, load_splits
from collapipe.state import ClusterState
from server_app.rounds.results import dry_run
from server_app.rounds.scheduler import Scheduler

Overrides = Sequence[str]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round."""

    delay_s: float  # of the slowest unit's pipeline and upload
    pipelines_s: tuple[float, ...]  # of each unit that took part
    took_part: tuple[bool, ...]  # which of the N units did
    largest_queue: float  # of all units' Y_n after it; 0 where the strategy keeps none
    over_limits: int  # how many units' plans exceed a device's memory or energy


RunHistory = tuple[RoundResult, ...]


def total_s(run: RunHistory) -> float:
    """Delay of all rounds: with uploads, of the unit that ends last."""
    return sum(each.delay_s for each in run)


def reduction(
    seeds: Iterable[Mapping[str, RunHistory]],
    of: str,
    against: str,
    seconds: Callable[[RunHistory], float] = total_s,
) -> Interval:
    """By how many percent one run takes less than another, paired by seed."""
    return over_seeds(100 * (1 - seconds(each[of]) / seconds(each[against])) for each in seeds)


def run_histories(
    seed: int, rounds: int, worlds: Mapping[str, Overrides], strategies: Mapping[str, Overrides]
) -> dict[str, dict[str, RunHistory]]:
    """Each strategy's rounds in each world.

    Both are what sets them apart from the experiment ``fig11``; a strategy's options are all under
    ``strategy``.
    """
    # What control units report is the same for all strategies; their rows, in all worlds, too.
    base = _settings(seed, ())
    tokenizer = build_tokenizer(base, load_splits(base).train)
    shards = [base.task.encode(shard, tokenizer) for shard in load_shards(base)]
    runs = {}
    for world, where in worlds.items():
        own = _settings(seed, where)
        states = [
            cluster_state(own, unit, shards[unit], tokenizer.vocabulary)
            for unit in range(own.federation.num_units)
        ]
        for strategy, how in strategies.items():
            runs[world, strategy] = _run(_settings(seed, where, how), rounds, states)
    # Round by round: what all of them compute from the same devices is computed once.
    by_run = dict(zip(runs, zip(*zip(*runs.values(), strict=True), strict=True), strict=True))
    return {world: {each: by_run[world, each] for each in strategies} for world in worlds}


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


def _settings(seed: int, where: Overrides, how: Overrides | None = None) -> Settings:
    """A world with that seed, and with the strategy of ``how``, or its own."""
    world, chosen = _load(tuple(where)), _load(tuple(where if how is None else how))
    tree = {**world.tree, "seed": seed, "strategy": chosen.tree["strategy"]}
    return replace(world, seed=seed, tree=tree)


@functools.cache  # composing takes a good part of a second
def _load(options: tuple[str, ...]) -> Settings:
    return config.load_overrides(("experiment=fig11", *options))
