"""Figures of the scheduler alone: their histories equal real runs, and their sums are correct."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from run_files import rounds_of

from collapipe.cli.run import run_job
from reproduction import fig11, frameworks
from reproduction.fig11 import dssra
from reproduction.figure import reduction
from reproduction.frameworks import LABELS, mean_cluster_s, plain
from reproduction.scheduling import RunHistory, ScheduledRound, run_histories, total_s

SMALL, BARE = ("federation.num_units=5", "model.num_blocks=6"), "channel.activation_bits=0"
WORLDS = {"full": SMALL, "adapters": (*SMALL, BARE)}
STRATEGIES = {
    # Searches for shared stages would take most of the time.
    "dssra": ("strategy=dssra", "strategy.drift_weight=0.1", "strategy.sharing=never"),
    "random": ("strategy=random",),
    "delay-only": ("strategy=delay_only",),
}


@functools.cache
def found() -> dict[tuple[str, str], RunHistory]:
    """Six rounds with seed 3 for each world and strategy."""
    runs = itertools.product(WORLDS, STRATEGIES)
    return run_histories(3, 6, {(w, s): (WORLDS[w], STRATEGIES[s]) for w, s in runs})


@pytest.mark.parametrize(
    "framework", ["collapipe", pytest.param("pipeline", marks=pytest.mark.thorough)]
)
def test_a_history_equals_the_run_of_the_command(framework: str, tmp_path: Path) -> None:
    options = (f"framework={framework}", *SMALL)
    own = "seed=3", "federation.rounds=3", f"hydra.run.dir={tmp_path}"
    run_job(["experiment=fig11", *options, *STRATEGIES["dssra"], *own])
    lines = rounds_of(tmp_path)
    history = run_histories(3, 3, {"": (options, STRATEGIES["dssra"])})[""]
    assert len(lines) == 3
    for line, result in zip(lines, history, strict=True):
        assert result.delay_s == line["cost"]["delay_s"]
        assert result.pipelines_s == tuple(each["pipeline_s"] for each in line["cost"]["clusters"])
        assert result.largest_queue == max(line["queues"])
        assert np.flatnonzero(result.took_part).tolist() == line["units"]
        assert result.over_limits == sum(c["over_limits"] for c in line["plan"]["clusters"])


def test_a_history_does_not_depend_on_other_histories() -> None:
    runs = {("adapters", "random"): (WORLDS["adapters"], STRATEGIES["random"])}
    alone, other = (run_histories(seed, 6, runs) for seed in (3, 4))
    assert alone["adapters", "random"] == found()["adapters", "random"]
    assert other != alone


def test_losses_that_persist_choose_the_same_units_in_every_round() -> None:
    runs = dict.fromkeys(("anew", "persistent"), (SMALL, ("strategy=loss_only",)))
    histories = run_histories(3, 8, runs, keep_losses=("persistent",))
    # In the first round no unit has a loss yet.
    chosen = {name: {each.took_part for each in run[2:]} for name, run in histories.items()}
    assert len(chosen["persistent"]) == 1
    assert len(chosen["anew"]) > 1


def test_every_round_schedules_as_many_units_as_there_are_channels() -> None:
    for history in found().values():
        assert [sum(result.took_part) for result in history] == [4] * 6
    for world in WORLDS:
        by_strategy = {strategy: found()[world, strategy] for strategy in STRATEGIES}
        assert max(result.largest_queue for result in by_strategy["dssra"]) > 0
        assert all(result.largest_queue == 0 for result in by_strategy["random"])
        # The same pipelines are fastest in most rounds; random scheduling takes all units.
        taken = {name: np.sum([t.took_part for t in c], axis=0) for name, c in by_strategy.items()}
        assert taken["random"].min() > taken["delay-only"].min()


def test_uploads_without_activations_are_shorter() -> None:
    # Random scheduling ignores uplinks, so it takes the same units in both worlds.
    pairs = [*zip(found()["full", "random"], found()["adapters", "random"], strict=True)]
    assert all(full.took_part == bare.took_part for full, bare in pairs)
    assert all(full.delay_s > bare.delay_s for full, bare in pairs)


def result(delay_s: float, took_part: tuple[bool, ...], queue: float = 0.0) -> ScheduledRound:
    return ScheduledRound(delay_s, (delay_s / 2,), took_part, queue, 0)


def test_reductions_shares_and_queues_have_the_expected_values() -> None:
    queues = (1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 9.0, 11.0)
    slow = tuple(result(10.0, (True, False), queue) for queue in queues)
    fast = tuple(result(8.0, (place < 2, place >= 2)) for place in range(8))
    runs = {"slow": slow, "fast": fast}
    assert reduction([runs], "fast", "slow", total_s).mean == pytest.approx(20)
    assert reduction([runs], "slow", "fast", total_s).mean == pytest.approx(-25)
    assert fig11.shares(slow) == (0, 100)
    assert fig11.shares(fast) == (25, 75)
    assert fig11.queues(slow) == (5, 10)  # third and last quarter


def test_reductions_are_paired_by_seed() -> None:
    pairs = [(9.0, 10.0), (90.0, 100.0)]
    samples = [
        {"own": (result(own, (True,)),), "other": (result(other, (True,)),)} for own, other in pairs
    ]
    for seconds in (total_s, mean_cluster_s):
        interval = reduction(samples, "own", "other", seconds)
        assert (interval.mean, interval.low) == (pytest.approx(10), pytest.approx(10))


def test_frameworks_use_the_same_devices_and_upload_their_own_payloads() -> None:
    worlds = {
        plain(name, "static", uploads): (f"framework={name}", "environment=static", *bits)
        for name in ("vanilla_fl", "pipeline")
        for uploads, bits in (("activations too", ()), ("adapters", (BARE,)))
    }
    worlds[plain("collapipe")] = ("environment=static",)
    sample = frameworks.play(0, 2, worlds)
    uploads = {
        (name, what): sample[plain(name, "static", what)][0].delay_s
        - max(sample[plain(name, "static", what)][0].pipelines_s)
        for name in ("vanilla_fl", "pipeline")
        for what in ("activations too", "adapters")
    }
    # VanillaFL's replicas send no activations, PipeLine's own models no adapters.
    assert uploads["vanilla_fl", "activations too"] == uploads["vanilla_fl", "adapters"] > 5
    assert uploads["pipeline", "activations too"] > 5  # the part that its pipeline does not hide
    assert uploads["pipeline", "adapters"] == 0
    own = sample[plain("collapipe")]
    assert own[0] == own[1]  # the environment is static
    assert own[0].over_limits == 0
    assert sample[plain("vanilla_fl")][0].over_limits == 3  # 12 blocks, but only 6 fit
    assert max(own[0].pipelines_s) < max(sample[plain("pipeline")][0].pipelines_s)


def test_worlds_cover_every_payload_and_bandwidth() -> None:
    worlds = frameworks.worlds()
    payloads = len(frameworks.PAYLOADS) + 1  # and VanillaFL
    assert len(worlds) == 4 * len(LABELS) + payloads * len(frameworks.FACTORS)
    assert worlds["bfloat16; 2 times the bandwidth"] == (
        "compression.activation=bfloat16",
        "environment=static",
        "channel.bandwidth_hz=[800000.0,1200000.0]",
    )


def test_fig11_has_a_rule_for_each_name_in_the_paper() -> None:
    assert {*fig11._PAPER} == {*fig11.RULES}
    assert dssra(0.01) in fig11.PLANNED
