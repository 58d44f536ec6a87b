"""``collapipe device measure`` fits laws to times; here the times are scripted."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from full_disk import full_disk
from step_laws import law_of

from collapipe.cli.device import measure, trial_run
from collapipe.cli.device.hop_times import Trip
from collapipe.cli.device.law_table import Measured
from collapipe.cli.device.measure import Measuring
from collapipe.cli.device.survey import Hop, SurveyedDevice
from collapipe.cli.device.trial_round import Trial
from collapipe.errors import ConfigError, InfeasibleRoundError, LinkError
from collapipe.inventory.file import read_inventory
from collapipe.inventory.measured_step import step_file
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import from_text, load
from collapipe.models.transformer import TransformerSpec
from collapipe.state import AffineLaw, BlockCost, DeviceProfile
from collapipe.wire.device_address import DeviceAddress

U, V = 3e-4, 2e-3
HEAD = "batch_size: 64\nmodel: {name: transformer}\nclusters:\n  - name: a\n    devices:\n"
WAY = Hop("", "", (Trip(1, 1e-3), Trip(1000, 2e-3)))
DEVICE = "{name: device-%d, address: 127.0.0.1:%d, flops_per_s: 1, d2d_rate_bps: 1}"
OPTIONS = ["model.dim=32"]
PAIRS = [("device-2", "device-1"), ("device-0", "device-3")]
LINKS = "    links:\n" + "".join(
    f"      - {{between: [{a}, {b}], d2d_rate_bps: 1}}\n" for a, b in PAIRS
)
TRIAL = Trial(TransformerSpec(4, 1, 64, 4, 256, 0.0), BlockCost(1e6, 2e6, 1e6, 1e6, 1e6), 32, 64, 5)


class Boxes:
    """Fake devices with equal laws; ``slowed`` has a factor for the times of each pass."""

    def __init__(self, slowed: Sequence[float], lost_in: int | None = None) -> None:
        self.slowed, self.lost_in = slowed, lost_in
        self.timed, self.runs = list[str](), list[list[str]]()
        self.ways = dict[tuple[str, str], Hop]()  # by their ends; the default is ``WAY``

    def chunk_seconds(
        self, device: DeviceAddress, dialer: object, trial: Trial, blocks: int
    ) -> list[list[float]]:
        number = self.timed.count(device.name) // 2  # each pass times one and two blocks
        self.timed.append(device.name)
        if number == self.lost_in and device.name == "device-1":
            raise LinkError("device-1: lost")
        factor = self.slowed[number % len(self.slowed)]
        return [[factor * blocks * (U * size + V)] * trial.repeats for size in trial.samples]


def measured(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch, count: int = 2, links: str = ""
) -> list[Measured]:
    text = inventory(count, links)
    section = from_text(Path("boxes.yaml"), text).parse(InventorySection)
    scripted(boxes, monkeypatch)
    return Measuring(cast(Any, None), TRIAL).laws(section)


def inventory(count: int, links: str = "") -> str:
    return HEAD + "".join(f"      - {DEVICE % (k, 7000 + k)}\n" for k in range(count)) + links


def scripted(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the devices of an inventory's cluster with ``boxes``."""
    status = cast(Any, SimpleNamespace(busy=False, memory_bytes=1e9))

    def ask_all(section: InventorySection, _: object) -> list[list[SurveyedDevice]]:
        (cluster,) = section.clusters
        return [[SurveyedDevice("a", each, status, None) for each in cluster.devices]]

    def time_hops(run: list[SurveyedDevice], *_: object) -> list[Hop]:
        boxes.runs.append([each.name for each in run])
        ends = pairwise(["control unit", *boxes.runs[-1], "control unit"])
        return [replace(boxes.ways.get(each, WAY), source=each[0], target=each[1]) for each in ends]

    monkeypatch.setattr(measure, "ask_all", ask_all)
    monkeypatch.setattr(measure, "time_hops", time_hops)
    monkeypatch.setattr(measure, "chunk_seconds", boxes.chunk_seconds)


def rows(out: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = (re.split(r" {2,}", each.strip()) for each in out.splitlines())
    return [each for each in lines if each[0].startswith("device-")]


def test_equal_devices_get_equal_laws_even_if_half_the_passes_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = Boxes([1.6, 1.0])
    for each in measured(boxes, monkeypatch):
        assert each.law is not None
        assert (each.law.u, each.law.v) == pytest.approx((U, V))
        assert each.compute_error == pytest.approx(0.0, abs=1e-6)
    assert boxes.timed[:8] == ["device-0", "device-0", "device-1", "device-1"] * 2


def test_links_are_measured_separately_from_usual_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices 1 and 2 are neighbours in the file, but their hop is a link."""
    boxes = Boxes([1.0])
    boxes.ways["device-2", "device-1"] = Hop("", "", (Trip(1, 0.1), Trip(1000, 0.1 + 999e-3)))
    *devices, link, other = measured(boxes, monkeypatch, 4, LINKS)
    runs = [("device-0", "device-1"), ("device-2", "device-3"), *PAIRS]
    assert boxes.runs == [list(each) for each in runs]
    assert [each.key for each in devices] == [("a", f"device-{k}") for k in range(4)]
    assert [link.key, other.key] == [("a", *each) for each in PAIRS]
    assert link.law and other.law
    byte_s = link.law.w / (TRIAL.cost.hop_bits / 8 / 2)  # each way
    assert (link.law.u, link.law.v, byte_s) == (0.0, 0.0, pytest.approx(1e-3))
    assert link.law.ell == pytest.approx(0.099)
    for each in devices:
        assert each.law and (each.law.w, each.law.ell) == (other.law.w, other.law.ell)


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        (Hop("", "", error="timed out"), "timed out"),
        (Hop("", "", busy=True), "is busy"),
        (Hop("", ""), "cannot be used"),
        (Hop("", "", [Trip(128, 9.0)]), "128 B"),
        (Hop("", "", [Trip(128, 1e-3), Trip(4096, 1e-3), Trip(16384, 1e-3)]), "no longer"),
        (Hop("", "", [Trip(128, 2e-3), Trip(4096, 1e-3)]), "no longer"),
    ],
    ids=["error", "busy", "unusable", "slow", "constant", "faster-if-larger"],
)
def test_a_link_that_cannot_be_measured_keeps_its_figures(
    way: Hop,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All other measurements are written to the file; no written rate is infinite."""
    boxes, file = Boxes([1.0]), tmp_path / "boxes.yaml"
    boxes.ways[PAIRS[0]] = way
    file.write_text(inventory(4, LINKS))
    scripted(boxes, monkeypatch)
    assert measure.measure_devices(file, OPTIONS, repeats=1, write=True) == 1
    out, err = capsys.readouterr()
    (line,) = (each for each in err.splitlines() if each.startswith("error: "))
    assert line.startswith("error: device-2 - device-1: hop to device-1: ") and cause in line
    assert [*rows(out)[-2:]] == [
        ["device-2 - device-1", "fails", *"-----"],
        ["device-0 - device-3", *"---", *rows(out)[-1][4:]],
    ]
    section = load(file).parse(InventorySection).clusters[0]
    assert all(each.chunk for each in section.devices)
    kept, written = section.links
    assert (kept.d2d_rate_bps, kept.hop_latency_s) == (1.0, None)
    assert written.d2d_rate_bps == pytest.approx(16 / (1e-3 / 999), rel=1e-3)


def test_the_trial_run_is_planned_with_measured_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boxes, file, planned = Boxes([1.0]), tmp_path / "boxes.yaml", list[DeviceProfile]()
    boxes.ways[PAIRS[0]] = Hop("", "", (Trip(1, 0.1), Trip(1000, 0.1 + 999e-3)))
    file.write_text(inventory(4, LINKS))
    scripted(boxes, monkeypatch)

    def steps(*given: object) -> tuple[dict[str, object], list[None]]:
        planned.extend(read_inventory(file, TRIAL.cost).clusters[0].profiles)
        return {}, []

    monkeypatch.setattr(measure, "measured_steps", steps)
    assert measure.measure_devices(file, OPTIONS, repeats=1, write=True) == 0
    (link,) = planned[1].links
    assert (link.to, link.ell) == ("device-2", pytest.approx(0.099, rel=1e-3))
    assert link.w == pytest.approx(1e-3 * TRIAL.cost.hop_bits / 16, rel=1e-3)


def test_impossible_times_of_a_device_leave_the_others_laws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = Boxes([1.0])
    boxes.ways["device-0", "device-1"] = Hop("", "", (Trip(1, 1e9), Trip(1000, 1e9)))
    first, second = measured(boxes, monkeypatch)
    assert first.fault is not None and first.fault.startswith("device-0: measured times")
    assert second.law is not None


def test_slow_devices_get_the_fewest_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MOST_S", 0.0)
    boxes = Boxes([1.0])
    assert all(each.law for each in measured(boxes, monkeypatch))
    assert len(boxes.timed) == 2 * 2 * 3


def test_a_device_that_is_lost_in_a_later_pass_has_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Boxes([1.0], lost_in=1)
    first, second = measured(boxes, monkeypatch)
    assert first.law is not None
    assert (second.law, second.fault) == (None, "device-1: lost")
    assert boxes.timed.count("device-1") == 3  # not timed again after the failure


@pytest.mark.parametrize(
    ("comment", "disk", "message"),
    [
        ("# of the data sheet\n       ", nullcontext, "a form in which laws cannot be put"),
        ("", full_disk, r"boxes\.yaml: cannot be written"),
    ],
)
def test_a_file_that_cannot_be_edited_is_refused_before_devices_are_measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    comment: str,
    disk: Callable[[], AbstractContextManager[None]],
    message: str,
) -> None:
    file, devices = tmp_path / "boxes.yaml", Boxes([1.0])
    text = inventory(4, LINKS).replace("flops_per_s: 1,", f"flops_per_s: 1, {comment}", 1)
    file.write_text(text)
    scripted(devices, monkeypatch)
    with disk(), pytest.raises(ConfigError, match=message):
        measure.measure_devices(file, [], repeats=1, write=True)
    assert (devices.timed, file.read_text()) == ([], text)
    measure.measure_devices(file, [], repeats=1, write=False)
    assert devices.timed


def test_steps_need_options_and_write_and_start_without_old_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, calls = tmp_path / "boxes.yaml", list[tuple[object, ...]]()
    measured = list[None]()
    file.write_text(inventory(1))

    def laws(self: Measuring, section: InventorySection) -> list[Measured]:
        return [Measured(("a", "device-0"), AffineLaw(U, V, 0.0, 0.0))]

    def steps(*given: object) -> tuple[dict[str, object], list[None]]:
        calls.append((*given, step_file(file).exists()))
        return {}, measured

    monkeypatch.setattr(Measuring, "laws", laws)
    monkeypatch.setattr(measure, "measured_steps", steps)
    for overrides, write in (([], True), (OPTIONS, False), (OPTIONS, True), (OPTIONS, True)):
        assert measure.measure_devices(file, overrides, repeats=1, write=write) == 0
    assert calls == [(file, 1, OPTIONS, 8, False)] * 2
    assert step_file(file).exists()
    assert measure.measure_devices(file, [], repeats=1, write=True) == 0
    assert not step_file(file).exists()
    measured.append(None)
    assert measure.measure_devices(file, OPTIONS, repeats=1, write=True) == 1
    assert "error: a: its steps were not measured" in capsys.readouterr().err


def test_rounds_of_a_trial_run_are_shorter_if_a_step_takes_long() -> None:
    """All steps together take at most 45 s, but a round has at least two steps."""
    law = AffineLaw(0.5, 0.0, 0.0, 0.0)
    assert trial_run.least_step_s(48, [law]) == 24.0
    assert trial_run.least_step_s(48, [law, law]) == 12.0
    assert [trial_run.steps_of(each) for each in (0.001, 1.5, 3.75, 12.0, 24.0)] == [8, 8, 3, 2, 2]


def test_a_trial_with_one_micro_batch_has_no_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = list[Sequence[str]]()
    monkeypatch.setattr(trial_run, "run_job", lambda options: ran.append(options) or tmp_path)
    monkeypatch.setattr(trial_run, "read_run", lambda _: SimpleNamespace(tree={}))
    for laws in ([law_of(["a"], m=1)], [None]):
        monkeypatch.setattr(trial_run, "laws_of", lambda *_, found=laws: found)
        assert trial_run.measured_steps(tmp_path / "a.yaml", 1, (), 2) == ({}, laws)
    assert len(ran) == 2
    assert not capsys.readouterr().err


def test_a_trial_with_fewer_micro_batches_may_be_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Larger micro-batches need more memory. The measured law of the first run is kept."""
    law, ran = law_of(["a"], m=4), list[str]()

    def run_job(options: Sequence[str]) -> Path:
        ran.append(next(each for each in reversed(options) if "num_micro_batches" in each))
        if ran[-1].endswith("=2"):
            raise InfeasibleRoundError("no memory")
        return tmp_path

    monkeypatch.setattr(trial_run, "run_job", run_job)
    monkeypatch.setattr(trial_run, "read_run", lambda _: SimpleNamespace(tree={}))
    monkeypatch.setattr(trial_run, "laws_of", lambda *_: [law])
    options = ["pipeline.num_micro_batches=8"]
    assert trial_run.measured_steps(tmp_path / "a.yaml", 1, options, 2) == ({}, [law])
    assert ran == ["pipeline.num_micro_batches=8", "pipeline.num_micro_batches=2"]
    assert "pipeline.num_micro_batches=2: no memory" in capsys.readouterr().err
