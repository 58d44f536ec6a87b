"""A trace shows when sending ends; the step of median length is drawn."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_run import made_lines
from pydantic import TypeAdapter

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span, UplinkPlan
from collapipe.report import DeviceTrace, RoundTraces
from collapipe.run_report.trace import (
    SEND,
    SEND_BACK,
    Event,
    _events,
    _measured,
    _stage_numbers,
    _tables,
    _typical_step,
    covered,
    read_trace,
)
from collapipe.runs.reading import read_run
from collapipe.state import HeadPlace

LENGTHS = (9.0, 0.3, 2.0, 0.2)  # seconds of each step


def stage_of(
    name: str, *rows: tuple[float, float, float, float], stage: str = "segment"
) -> DeviceTrace:
    """A stage whose steps differ only in their length."""
    steps, began_s = [], 0.0
    for length in LENGTHS:
        steps.append(tuple(tuple(began_s + length * each for each in row) for row in rows))
        began_s += 10.0
    return TypeAdapter(DeviceTrace).validate_python(
        {"name": name, "error_s": 0.0, "steps": steps, "stage": stage}
    )


@pytest.fixture
def slices(run: Path) -> list[Event]:
    """One micro-batch on two devices.

    The second device is still busy when its input of the forward pass arrives.
    """
    cluster = list(made_lines(20))[-1]["plan"]["clusters"][0]
    first, second = [each["device"] for each in cluster["segments"]]
    stages = (
        stage_of("here", (0.0, 0.0, 0.1, 0.1), (0.8, 0.9, 1.0, 1.0), stage="embedding"),
        stage_of(first, (0.0, 0.15, 0.2, 0.22), (0.2, 0.7, 0.8, 0.82)),
        stage_of(second, (0.3, 0.3, 0.4, 0.41), (0.4, 0.57, 0.6, 0.61)),
        stage_of("here", (0.45, 0.45, 0.46, 0.46), (0.46, 0.46, 0.5, 0.5), stage="head"),
    )
    line = TypeAdapter(RoundTraces).dump_json(RoundTraces(20, {cluster["unit"]: stages}))
    (run / "traces.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    return [each for each in read_trace(run, 20).events if each["ph"] == "X"]


def test_sending_ends_when_a_waiting_neighbour_receives_the_output(slices: list[Event]) -> None:
    first = [each for each in slices if each["args"]["step"] == 0]
    sent = {
        (each["pid"], each["name"]): (each["ts"] + each["dur"]) / 9e6
        for each in first
        if each["tid"] in {SEND, SEND_BACK}
    }
    expected = {
        **{(1, "F1"): 0.15, (2, "F1"): 0.22, (3, "F1"): 0.41, (4, "F1"): 0.46},
        **{(4, "B1"): 0.57, (3, "B1"): 0.7, (2, "B1"): 0.82, (1, "B1"): 1.0},
    }
    assert sent == pytest.approx(expected)


def test_a_file_without_a_complete_round_is_refused(run: Path) -> None:
    (run / "traces.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ConfigError, match=r"has no whole round: the first is being written, or"):
        read_trace(run, None)


def test_the_error_for_a_missing_file_states_the_cause(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"real devices .* write it"):
        read_trace(run, None)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no round has finished yet"):
        read_trace(run, None)


def test_a_picture_and_a_timeline_are_not_written_at_once(command: Callable[..., Any]) -> None:
    status, _, err = command("trace", "--plot", "step.svg", "--output", "trace.json")
    assert status == 2 and "--output FILE and --plot FILE" in err


def test_the_step_of_median_length_is_drawn(slices: list[Event]) -> None:
    assert {(each["args"]["step"], begin) for each, begin in _typical_step(slices)} == {(2, 20e6)}


def test_a_head_is_busy_once_while_it_computes_and_gets_the_next_submission() -> None:
    """Its first three submissions, two of them within its first answer."""
    assert covered([(0, 1), (3, 4), (1, 5), (1.5, 2), (6, 7)]) == 6.0
    assert covered([]) == 0.0


def test_devices_that_share_a_segment_are_one_stage() -> None:
    """1F1B with four micro-batches on two devices, then on one; hops lead to each device."""
    segments = (
        SegmentPlan("a", Span(0, 1), (Share("a", 1), Share("b", 1))),
        SegmentPlan("c", Span(1, 1)),
    )
    plan = ClusterPlan(0, segments, 4, "one_f_one_b")
    rows = [(k, k, k + 0.5, k + 0.5) for k in range(8)]
    stages = [
        stage_of("here", *rows, stage="embedding"),
        *(stage_of(name, *rows) for name in "abc"),
        stage_of("here", *rows, stage="head"),
    ]
    numbers, last = _stage_numbers(plan, stages)
    assert (numbers, last) == ([0, 1, 1, 2, 3], 3)
    tables = {
        (process, 0): next(_tables(plan.schedule, each, number, last))
        for process, (each, number) in enumerate(zip(stages, numbers, strict=True))
    }
    orders = [" ".join(map(str, tables[process, 0])) for process in range(5)]
    assert orders[1] == orders[2] == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert orders[3] == "F0 F1 B0 F2 B1 F3 B2 B3"
    events = _measured(tables, dict(enumerate(numbers)), 0, ())
    hops = {each["id"].rsplit(" ", 2)[0] for each in events if each["ph"] == "s"}
    pairs = {(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)}
    assert hops == {f"{a} {b}" for pair in pairs for a, b in (pair, pair[::-1])}


@pytest.mark.parametrize(
    ("mode", "unsplit", "chosen", "expected"),
    [
        ("per_cluster", False, None, "unit 0, head on the server"),
        ("per_cluster", True, None, "unit 0, here, head"),
        ("control_unit", False, None, "unit 0, here, head"),
        ("auto", False, "control_unit", "unit 0, here, head"),
        ("auto", False, "server", "unit 0, head on the server"),
    ],
)
def test_a_head_on_the_server_is_named(
    run: Path, mode: str, unsplit: bool, chosen: HeadPlace | None, expected: str
) -> None:
    read = read_run(run)
    framework = {**read.tree["framework"], "unsplit": unsplit}
    tree = {**read.tree, "decoder": {"mode": mode}, "framework": framework}
    read = replace(read, tree=tree)
    line = read.rounds[-1]
    uplink = UplinkPlan(0, 0.1, 1.0, 1.0, head=chosen)
    plan = ClusterPlan(0, (SegmentPlan("a", Span(0, 2)),), 1, "gpipe", uplink=uplink)
    stages = (stage_of("here", (0.1, 0.1, 0.2, 0.2), (0.3, 0.3, 0.4, 0.4), stage="head"),)
    traces = RoundTraces(line.round, {0: stages})
    line = replace(line, plan=replace(line.plan, clusters=(plan,)))
    events = _events(read, line, traces)
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {expected}


def test_each_unit_has_its_own_step_of_median_length(slices: list[Event]) -> None:
    later = (each | {"ts": each["ts"] + 3e6 * each["args"]["step"]} for each in slices)
    other = [each | {"args": each["args"] | {"unit": 99}} for each in later]
    found = {(each["args"]["unit"], begin) for each, begin in _typical_step([*slices, *other])}
    assert found == {(slices[0]["args"]["unit"], 20e6), (99, 26e6)}


def test_steps_computed_again_after_a_loss_are_marked_and_not_drawn(slices: list[Event]) -> None:
    """The head computes next to nothing in such a step."""
    assert {each["args"]["step"] for each in slices if each["args"]["repeated"]} == {1, 3}
    assert {each["args"]["step"] for each, _ in _typical_step(slices)} == {2}


def test_a_damaged_line_is_refused_with_its_field(run: Path) -> None:
    (run / "traces.jsonl.gz").write_bytes(gzip.compress(b'{"round":"x","units":{}}\n'))
    with pytest.raises(ConfigError, match=r"round: must be a whole number, not 'x'"):
        read_trace(run, None)
