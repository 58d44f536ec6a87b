"""Figures of the scheduler alone: they are runs of the product, and add up."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from collapipe.cli.run import run_job
from collapipe.reproduction import fig11, frameworks
from collapipe.reproduction.fig11 import MAIN, Sample, dssra
from collapipe.reproduction.frameworks import LABELS, cut, mean_cluster_s, plain, total_s
from collapipe.reproduction.processes import of_seeds
from collapipe.reproduction.scheduling import Course, Turn, courses

WORLDS = {"full": (), "adapters": ("channel.activation_bits=0",)}
STRATEGIES = {
    "dssra": ("strategy=dssra", "strategy.drift_weight=0.1"),
    "random": ("strategy=random",),
    "delay-only": ("strategy=delay_only",),
}


@functools.cache
def found() -> dict[str, dict[str, Course]]:
    """A few rounds of seed 3."""
    return courses(3, 6, WORLDS, STRATEGIES)


@pytest.mark.parametrize("framework", ["collapipe", "pipeline"])
def test_a_course_is_what_the_command_runs(framework: str, tmp_path: Path) -> None:
    options = (f"framework={framework}", "federation.num_units=5")
    run_job(
        [
            "experiment=fig11",
            *options,
            *STRATEGIES["dssra"],
            "seed=3",
            "federation.rounds=3",
            f"hydra.run.dir={tmp_path}",
        ]
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (course,) = courses(3, 3, {"": options}, {"dssra": STRATEGIES["dssra"]})[""].values()
    assert len(lines) == 3
    for line, turn in zip(lines, course, strict=True):
        assert turn.delay_s == line["cost"]["delay_s"]
        assert turn.pipelines_s == tuple(each["pipeline_s"] for each in line["cost"]["clusters"])
        assert turn.largest_queue == max(line["queues"])
        assert np.flatnonzero(turn.took_part).tolist() == line["units"]
        assert turn.over_limits == sum(c["over_limits"] for c in line["plan"]["clusters"])


def test_a_course_does_not_depend_on_those_beside_it() -> None:
    alone = courses(3, 6, {"adapters": WORLDS["adapters"]}, {"random": STRATEGIES["random"]})
    assert alone["adapters"]["random"] == found()["adapters"]["random"]
    other = courses(4, 6, {"adapters": WORLDS["adapters"]}, {"random": STRATEGIES["random"]})
    assert other != alone


def test_every_round_schedules_as_many_units_as_there_are_channels() -> None:
    for by_strategy in found().values():
        for course in by_strategy.values():
            assert [sum(turn.took_part) for turn in course] == [4] * 6
        assert max(turn.largest_queue for turn in by_strategy["dssra"]) > 0
        assert all(turn.largest_queue == 0 for turn in by_strategy["random"])
        # The fastest pipelines stay so in all rounds but few; chance takes everyone.
        taken = {name: np.sum([t.took_part for t in c], axis=0) for name, c in by_strategy.items()}
        assert taken["random"].min() > taken["delay-only"].min()


def test_uploads_without_activations_are_shorter() -> None:
    # The same units: chance looks at no uplinks.
    pairs = zip(found()["full"]["random"], found()["adapters"]["random"], strict=True)
    assert all(full.took_part == bare.took_part for full, bare in pairs)
    pairs = zip(found()["full"]["random"], found()["adapters"]["random"], strict=True)
    assert all(full.delay_s > bare.delay_s + 30 for full, bare in pairs)


def turn(delay_s: float, took_part: tuple[bool, ...], queue: float = 0.0) -> Turn:
    return Turn(delay_s, (delay_s / 2,), took_part, queue, 0)


def test_a_sample_adds_up() -> None:
    slow = tuple(turn(10.0, (True, False), queue) for queue in (1.0, 2.0, 3.0, 4.0, 5, 5, 9, 11))
    fast = tuple(turn(8.0, (place < 2, place >= 2)) for place in range(8))
    sample = Sample({MAIN: {"slow": slow, "fast": fast}}, {})
    assert sample.cut(MAIN, "fast", "slow") == pytest.approx(20)
    assert sample.cut(MAIN, "slow", "fast") == pytest.approx(-25)
    assert sample.shares(MAIN, "slow") == (0, 100)
    assert sample.shares(MAIN, "fast") == (25, 75)
    assert sample.queues(MAIN, "slow") == (5, 10)  # third and last quarter
    assert sample.num_units(MAIN, "fast") == 1


def test_cuts_are_paired_by_seed() -> None:
    pairs = [(9.0, 10.0), (90.0, 100.0)]
    samples = [
        {"own": (turn(own, (True,)),), "other": (turn(other, (True,)),)} for own, other in pairs
    ]
    for seconds in (total_s, mean_cluster_s):
        interval = cut(samples, seconds, "own", "other")
        assert (interval.mean, interval.low) == (pytest.approx(10), pytest.approx(10))


def test_other_processes_answer_in_the_seeds_order() -> None:
    assert of_seeds(abs, [-3, 1, -2], processes=2) == [3, 1, 2]


def test_frameworks_meet_the_same_devices_and_send_what_is_theirs() -> None:
    worlds = {
        plain(name, "static", uploads): (f"framework={name}", "environment=static", *bits)
        for name in ("vanilla_fl", "pipeline")
        for uploads, bits in (("activations too", ()), ("adapters", WORLDS["adapters"]))
    }
    worlds[plain("collapipe")] = ("environment=static",)
    sample = frameworks._sample(0, 2, worlds)
    uploads = {
        (name, what): sample[plain(name, "static", what)][0].delay_s
        - max(sample[plain(name, "static", what)][0].pipelines_s)
        for name in ("vanilla_fl", "pipeline")
        for what in ("activations too", "adapters")
    }
    # Replicas send no activations, models of one's own no adapters.
    assert uploads["vanilla_fl", "activations too"] == uploads["vanilla_fl", "adapters"] > 5
    assert uploads["pipeline", "activations too"] > 50
    assert uploads["pipeline", "adapters"] == 0
    own = sample[plain("collapipe")]
    assert own[0] == own[1]  # nothing changes
    assert own[0].over_limits == 0
    assert sample[plain("vanilla_fl")][0].over_limits == 3  # 12 blocks where 6 fit
    assert max(own[0].pipelines_s) < max(sample[plain("pipeline")][0].pipelines_s)


def test_every_payload_and_bandwidth_is_a_world() -> None:
    worlds = frameworks._worlds()
    assert len(worlds) == 4 * len(LABELS) + 5 * len(frameworks.FACTORS)
    assert worlds["bfloat16; 2 times the bandwidth"] == (
        "environment=static",
        "channel.bandwidth_hz=[800000.0,1200000.0]",
        "channel.activation_bits=50331648.0",
    )


def test_the_papers_names_are_ours() -> None:
    assert {*fig11._PAPER} == {*fig11.RULES}
    assert dssra(0.01) in fig11.PLANNED
