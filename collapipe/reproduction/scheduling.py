"""Runs of the scheduler alone, side by side: what ``collapipe run framework.train=false`` does.

Units tell their clusters, the environment moves the world, the strategy decides, and its plan is
verified and costed, all by the apps' own code. Runs of one seed see the same devices and channels.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from client_app.cluster_state import cluster_state
from collapipe import config
from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.runs.rows import build_tokenizer, load_shards, load_splits
from collapipe.state import ClusterState
from collapipe.tasks.task import Examples
from collapipe.text.tokenizer import Vocabulary
from server_app.scheduled import scheduled
from server_app.scheduler import Scheduler

EXPERIMENT = "experiment=fig11"
Options = Sequence[str]


@dataclass(frozen=True, slots=True)
class Turn:
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


Course = tuple[Turn, ...]
"""A run's rounds."""


def courses(
    seed: int, rounds: int, worlds: Mapping[str, Options], strategies: Mapping[str, Options]
) -> dict[str, dict[str, Course]]:
    """Each strategy's course in each world.

    Parameters
    ----------
    worlds, strategies
        What sets each apart from the experiment ``fig11``; a strategy's options are all under
        ``strategy``.
    """
    base = _load((EXPERIMENT,))
    rows = Rows.of(_with(base, seed, base))
    runs = {
        (world, strategy): run
        for world, where in worlds.items()
        for strategy, run in _runs(seed, rounds, where, strategies, rows).items()
    }
    # Round by round: what all of them find out of the same devices is found once.
    found = zip(*zip(*runs.values(), strict=True), strict=True)
    by_run = dict(zip(runs, found, strict=True))
    return {world: {each: by_run[world, each] for each in strategies} for world in worlds}


def told(settings: Settings, rows: "Rows") -> tuple[ClusterState, ...]:
    """What a run's control units tell the server of their clusters."""
    units = range(settings.federation.num_units)
    return tuple(
        cluster_state(settings, unit, rows.examples[unit], rows.vocabulary) for unit in units
    )


@dataclass(frozen=True)
class Rows:
    """The units' rows, which are the same in all worlds of a seed."""

    examples: tuple[Examples, ...]
    vocabulary: Vocabulary

    @classmethod
    def of(cls, settings: Settings) -> "Rows":
        """Those of a run."""
        tokenizer = build_tokenizer(settings, load_splits(settings).train)
        shards = load_shards(settings)
        encoded = tuple(settings.task.encode(shard, tokenizer) for shard in shards)
        return cls(encoded, tokenizer.vocabulary)


def _runs(
    seed: int, rounds: int, where: Options, strategies: Mapping[str, Options], rows: Rows
) -> dict[str, Iterator[Turn]]:
    world = _load((EXPERIMENT, *where))
    reported = told(_with(world, seed, world), rows)
    return {
        name: _run(_with(world, seed, _load((EXPERIMENT, *how))), rounds, reported)
        for name, how in strategies.items()
    }


def _run(settings: Settings, rounds: int, reported: Sequence[ClusterState]) -> Iterator[Turn]:
    scheduler = Scheduler(settings, reported)
    for each in scheduled(settings, scheduler, range(1, rounds + 1)):
        yield _turn(each.report)


def _turn(report: RoundReport) -> Turn:
    return Turn(
        report.cost.delay_s,
        tuple(cost.pipeline_s for cost in report.cost.clusters),
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
