"""The chart of a local step agrees with the law that was used to plan the step."""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_run import made_lines, write_lines, write_summary
from pydantic import TypeAdapter
from report_page import Page
from step_laws import law_of, works_with

from collapipe.run_report import round as of_round
from collapipe.run_report.charts import Row
from collapipe.runs.reading import read_run
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, Payload, Uplink
from optim.planner import RoundRequest
from optim.step import step_s

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Sequence[Row]]:
    """The rows that the chart of a run's last local step draws."""

    def rows(folder: Path) -> Sequence[Row]:
        run, drawn = read_run(folder), list[Sequence[Row]]()
        monkeypatch.setattr(of_round, "rows", lambda *args, **_: drawn.append(args[2]))
        of_round.step_chart(run, run.rounds[-1])
        monkeypatch.undo()
        return drawn[0]

    return rows


def test_the_drawn_step_ends_at_the_time_that_its_law_gives(
    run: Path, report: Callable[..., Page], step: Callable[[Path], Sequence[Row]]
) -> None:
    clusters = list(made_lines(20))[-1]["plan"]["clusters"]
    laws = {f"device-{n}": AffineLaw(0.01 * (1 + n), 0.002, 0.001, 0.003) for n in range(3)}
    devices = tuple(DeviceProfile(name, law) for name, law in laws.items())
    states = tuple(ClusterState(unit, devices, 1000) for unit in range(8))
    request = RoundRequest(20, states, 6, 64, 20, None, 4, "one_f_one_b", (), (), ())
    lines = b"".join(
        TypeAdapter(RoundRequest).dump_json(replace(request, round=number)) + b"\n"
        for number in (1, 20)
    )
    (run / "requests.jsonl.gz").write_bytes(gzip.compress(lines))
    assert "A local step of round 20, modelled" in report(run).texts
    rows = [[span for kind, span in row.boxes if "hop" in kind.name] for row in step(run)]
    assert len(rows) == 2 * len(clusters)  # one row for each segment
    assert {len(row) for row in rows} == {4}  # micro-batches
    ends = [max(end for _, end in row) for row in rows[1::2]]
    assert ends == pytest.approx([_step_s(cluster, laws) for cluster in clusters])


def test_sending_activations_takes_the_time_of_the_chosen_precision(
    run: Path, step: Callable[[Path], Sequence[Row]]
) -> None:
    """The chart equals the chart of a unit that can send only this precision."""
    law, lines = AffineLaw(0.01, 0.002, 0.001, 0.003), list(made_lines(20))
    devices = tuple(DeviceProfile(f"device-{n}", law) for n in range(3))
    exact, int8 = (
        Payload("float32", "float32", 2e6, 4e6, 0.0),
        Payload("int8", "float32", 2e6, 1e6, 1e-5),
    )
    offering = Uplink(1.0, 1.0, *exact.bits, (1.0,) * 3, payloads=(exact, int8))
    drawn = []
    for uplink, chosen in ((offering, int8.choice), (offering.sending(int8), (None, None, None))):
        for cluster in lines[-1]["plan"]["clusters"]:
            cluster["uplink"] |= dict(zip(("activation", "upload", "head"), chosen, strict=True))
        write_lines(run, lines)
        states = tuple(ClusterState(unit, devices, 1000, uplink) for unit in range(8))
        request = RoundRequest(20, states, 6, 64, 1, None, 4, "one_f_one_b", (), (), ())
        data = TypeAdapter(RoundRequest).dump_json(request) + b"\n"
        (run / "requests.jsonl.gz").write_bytes(gzip.compress(data))
        drawn.append([row for row in step(run) if ", device" not in row.name])
    assert drawn[0]
    assert drawn[0] == drawn[1]


def test_a_simulated_step_has_the_control_unit_and_all_hops(
    run: Path, step: Callable[[Path], Sequence[Row]]
) -> None:
    """The chart ends at the planned time."""
    names = [f"device-{n}" for n in range(3)]
    law = law_of(names, send_s=0.5, embedding_forward_s=1.0, head_s=7.0, head_pace_s=2.0, factor=2)
    time = AffineLaw(0.1, 0.0, 0.0, 0.0)
    devices = tuple(DeviceProfile(name, time) for name in names)
    states = tuple(ClusterState(n, devices, 1000, real_devices=True, step=law) for n in range(8))
    request = RoundRequest(20, states, 6, 64, 20, None, 4, "one_f_one_b", (), (), ())
    data = TypeAdapter(RoundRequest).dump_json(request) + b"\n"
    (run / "requests.jsonl.gz").write_bytes(gzip.compress(data))
    cluster = list(made_lines(20))[-1]["plan"]["clusters"][0]
    held = [(each["device"], each["span"]["blocks"]) for each in cluster["segments"]]
    embedding, *segments, head = step(run)[: len(held) + 2]
    assert [each.name.split(", ")[1] for each in (embedding, head)] == ["embedding", "head"]
    hops = [[span for kind, span in row.boxes if "hop" in kind.name] for row in segments]
    assert [len(row) for row in hops] == [4, *[8] * (len(held) - 1)]  # first row: no gradients
    ends = [end for row in (embedding, *segments, head) for _, (_, end) in row.boxes]
    works = works_with(law, [name for name, _ in held], [1.6] * len(held), [n for _, n in held])
    assert max(ends) == pytest.approx(step_s(law, works, cluster["schedule"]))
    answers = [span for kind, span in head.boxes if "hop" not in kind.name]
    assert all(before[1] <= later[0] for before, later in pairwise(answers))


def _step_s(cluster: dict[str, Any], laws: dict[str, AffineLaw]) -> float:
    """The latency of 4 micro-batches of 16 samples under the law ``overlap``, written out."""
    held = [(laws[each["device"]], each["span"]["blocks"]) for each in cluster["segments"]]
    computes = [blocks * (law.u * 16 + law.v) for law, blocks in held]
    hops = [law.w * 16 + law.ell for law, _ in held]
    return sum(computes) + sum(hops) + 3 * max(*computes, *hops)


@pytest.mark.parametrize("damage", [b"no gzip", gzip.compress(b'{"round":20,}\n', mtime=0)])
def test_a_damaged_log_of_requests_gives_an_error_of_one_line(
    damage: bytes, run: Path, command: Command
) -> None:
    file = run / "requests.jsonl.gz"
    file.write_bytes(damage)
    status, out, err = command("report", run)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{file}: round 20: not what a run writes" in err


@pytest.mark.parametrize("name", ["local_steps", "num_segments"])
def test_an_impossible_count_in_a_request_is_an_error_that_names_the_file(
    name: str, run: Path, command: Command
) -> None:
    request = RoundRequest(20, (), 6, 64, 7, 7, 4, "one_f_one_b", (), (), ())
    line = TypeAdapter(RoundRequest).dump_json(request)
    line = line.replace(b'"%s":7' % name.encode(), b'"%s":0' % name.encode())
    file = run / "requests.jsonl.gz"
    file.write_bytes(gzip.compress(line + b"\n"))
    status, _, err = command("report", run)
    assert (status, err.count("\n")) == (2, 1), err
    assert f"{file}: round 20: not what a run writes ({name}=0: must be" in err


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("failed", "lacks round 20; restore it, or delete it to omit plans"),
        ("completed", "round 20: not what a run writes (Compressed"),
    ],
)
def test_a_truncated_log_of_requests_is_an_error(
    status: str, cause: str, run: Path, command: Command
) -> None:
    """A round's request is written before its metrics, so those of finished rounds are whole."""
    lines = gzip.compress(b'{"round":19,}\n') + gzip.compress(b'{"round":20,}\n')[:-12]
    (run / "requests.jsonl.gz").write_bytes(lines)
    write_summary(run, status=status)
    found, _, err = command("report", run)
    assert (found, cause in err) == (2, True), err


def test_plans_are_omitted_only_without_a_log_of_requests(
    run: Path, report: Callable[..., Page], command: Command
) -> None:
    assert "No local step is drawn: requests.jsonl.gz is missing." in report(run).texts
    (run / "requests.jsonl.gz").write_bytes(b"")
    status, _, err = command("report", run)
    assert (status, err.count("\n"), "lacks round 20; restore it" in err) == (2, 1, True), err
