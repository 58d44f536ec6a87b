"""Run only the scheduler, for several runs in parallel, as ``framework.train=false`` does.

Units report their clusters, the environment changes devices and channels, the strategy plans, and
its plan is verified and costed, all with the apps' code. Runs of one seed have equal devices and
channels.
"""

import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from client_app.cluster_state import cluster_state
from collapipe import config
from collapipe.config import Settings
from collapipe.runs.rows import build_tokenizer, load_shards
from collapipe.state import ClusterState
from server_app.planning.scheduler import Scheduler
from server_app.rounds.results import dry_run

Overrides = tuple[str, ...]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """A round's delays and participants."""

    delay_s: float  # of the slowest unit's pipeline and upload
    pipelines_s: tuple[float, ...]  # of each unit that took part
    took_part: tuple[bool, ...]  # which of the N units did
    largest_queue: float  # the largest Y_n after the round; 0 without queues
    over_limits: int  # how many units' plans exceed a device's memory or energy


RunHistory = tuple[ScheduledRound, ...]


def total_s(run: RunHistory) -> float:
    """Return the delay of all rounds with uploads; each round ends with its slowest unit."""
    return sum(each.delay_s for each in run)


def run_histories(
    seed: int,
    rounds: int,
    runs: Mapping[K, tuple[Overrides, Overrides]],
    keep_losses: Collection[K] = (),
) -> dict[K, RunHistory]:
    """Return the rounds of each run; a run is a strategy in a world.

    World and strategy are overrides of the experiment ``fig11``; a strategy's options are all under
    ``strategy``. In runs of ``keep_losses`` a unit has one loss for all rounds.
    """
    # Control units' reports are equal for all strategies; their rows also in all worlds.
    base = _settings(seed, ())
    tokenizer = build_tokenizer(base)
    shards = [base.task.encode(shard, tokenizer) for shard in load_shards(base)]

    @functools.cache
    def states(world: Overrides) -> list[ClusterState]:
        own = _settings(seed, world)
        units = range(own.federation.num_units)
        return [cluster_state(own, unit, shards[unit], tokenizer.vocabulary) for unit in units]

    going = [
        _run(_settings(seed, *each), rounds, states(each[0]), key in keep_losses)
        for key, each in runs.items()
    ]
    # Runs advance together, so that results for the same devices are computed once.
    return dict(zip(runs, zip(*zip(*going, strict=True), strict=True), strict=True))


def _run(
    settings: Settings, rounds: int, states: Sequence[ClusterState], keep_losses: bool
) -> Iterator[ScheduledRound]:
    scheduler = Scheduler(settings)
    start = scheduler.begin(states)
    for each, _ in dry_run(settings, scheduler, start, range(1, rounds + 1), keep_losses):
        report = each.report
        yield ScheduledRound(
            report.cost.delay_s,
            tuple(cost.pipeline_s for cost in report.costs.values()),
            tuple(unit in report.units for unit in range(len(report.queues))),
            max(report.queues),
            sum(cluster.over_limits for cluster in report.plan.clusters),
        )


def _settings(seed: int, world: Overrides, strategy: Overrides = ()) -> Settings:
    settings = _load(world)
    tree = {**settings.tree, "seed": seed, "strategy": _load(strategy).tree["strategy"]}
    return replace(settings, seed=seed, tree=tree)


@functools.cache  # composing takes a good part of a second
def _load(options: Overrides) -> Settings:
    return config.load_overrides(("experiment=fig11", *options))
