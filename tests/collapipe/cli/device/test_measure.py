"""How ``collapipe device measure`` makes laws of times, with scripted times."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from collapipe.cli.device import measure
from collapipe.cli.device.measure import MeasuredDevice, Measuring
from collapipe.cli.device.survey import Hop, SurveyedDevice
from collapipe.cli.device.trial_round import Trial, Trip
from collapipe.errors import LinkError
from collapipe.inventory.measured_step import step_file
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import from_text
from collapipe.models.transformer import TransformerSpec
from collapipe.state import AffineLaw, BlockCost
from collapipe.wire.channels import DeviceAddress

U, V = 3e-4, 2e-3
DEVICE = "{name: device-%d, address: 127.0.0.1:%d, flops_per_s: 1, d2d_rate_bps: 1}"
TRIAL = Trial(TransformerSpec(4, 1, 64, 4, 256, 0.0), BlockCost(1e6, 2e6, 1e6, 1e6, 1e6), 32, 64, 5)


class Boxes:
    """Devices of one machine with equal laws; ``slowed`` maps a pass to the factor of its times."""

    def __init__(self, slowed: Sequence[float], lost_in: int | None = None) -> None:
        self.slowed, self.lost_in = slowed, lost_in
        self.asked, self.runs = list[str](), list[list[str]]()

    def chunk_seconds(
        self, device: DeviceAddress, dialer: object, trial: Trial, blocks: int
    ) -> list[list[float]]:
        number = self.asked.count(device.name) // 2  # one and two blocks in each pass
        self.asked.append(device.name)
        if number == self.lost_in and device.name == "device-1":
            raise LinkError("device-1: lost")
        factor = self.slowed[number % len(self.slowed)]
        return [[factor * blocks * (U * size + V)] * trial.repeats for size in trial.samples]


def measured(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch, count: int = 2, links: str = ""
) -> list[MeasuredDevice]:
    lines = "".join(f"      - {DEVICE % (k, 7000 + k)}\n" for k in range(count)) + links
    head = "batch_size: 64\nmodel: {name: transformer}\nclusters:\n  - name: a\n    devices:\n"
    section = from_text(Path("boxes.yaml"), head + lines).parse(InventorySection)
    status = cast(Any, SimpleNamespace(busy=False, memory_bytes=1e9))
    found = [SurveyedDevice("a", each, status, None) for each in section.clusters[0].devices]
    trips = Trip(1, 1e-3), Trip(1000, 2e-3)
    monkeypatch.setattr(measure, "ask_all", lambda *what: [found])

    def time_hops(run: list[SurveyedDevice], *_: object) -> list[Hop]:
        boxes.runs.append([each.name for each in run])
        return [Hop("", "", trips)] * (len(run) + 1)

    monkeypatch.setattr(measure, "time_hops", time_hops)
    monkeypatch.setattr(measure, "chunk_seconds", boxes.chunk_seconds)
    return Measuring(cast(Any, None), TRIAL).laws(section)


def test_equal_devices_get_equal_laws_though_half_of_the_passes_are_slowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = Boxes([1.6, 1.0])
    for each in measured(boxes, monkeypatch):
        assert each.law is not None
        assert (each.law.u, each.law.v) == pytest.approx((U, V))
        assert each.compute_error == pytest.approx(0.0, abs=1e-6)
    assert boxes.asked[:8] == ["device-0", "device-0", "device-1", "device-1"] * 2


def test_usual_hops_are_measured_not_links(monkeypatch: pytest.MonkeyPatch) -> None:
    links = "    links:\n      - {between: [device-2, device-1], d2d_rate_bps: 1}\n"
    boxes = Boxes([1.0])
    assert len(measured(boxes, monkeypatch, 4, links)) == 4
    assert boxes.runs == [["device-0", "device-1"], ["device-2", "device-3"]]


def test_slow_devices_get_the_fewest_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MOST_S", 0.0)
    boxes = Boxes([1.0])
    assert all(each.law for each in measured(boxes, monkeypatch))
    assert len(boxes.asked) == 2 * 2 * 3


def test_a_device_that_is_lost_in_a_later_pass_has_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Boxes([1.0], lost_in=1)
    first, second = measured(boxes, monkeypatch)
    assert first.law is not None
    assert (second.law, second.fault) == (None, "device-1: lost")
    assert boxes.asked.count("device-1") == 3  # it is not asked again


def test_steps_are_measured_with_options_and_write_and_never_begin_with_old_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "boxes.yaml", list[tuple[object, ...]]()
    measured = list[None]()
    head = "batch_size: 64\nmodel: {name: transformer}\nclusters:\n  - name: a\n    devices:\n"
    file.write_text(f"{head}      - {DEVICE % (0, 7000)}\n")

    def laws(self: Measuring, section: InventorySection) -> list[MeasuredDevice]:
        (device,) = section.clusters[0].devices
        return [MeasuredDevice(SurveyedDevice("a", device, None, None), AffineLaw(U, V, 0.0, 0.0))]

    def steps(*given: object) -> tuple[dict[str, object], list[None]]:
        asked.append((*given, step_file(file).exists()))
        return {}, measured

    monkeypatch.setattr(Measuring, "laws", laws)
    monkeypatch.setattr(measure, "measured_steps", steps)
    options = ["model.dim=32"]
    for overrides, write in (([], True), (options, False), (options, True), (options, True)):
        assert measure.measure_devices(file, overrides, repeats=1, write=write) == 0
    assert asked == [(file, 1, options, 8, False)] * 2
    assert step_file(file).exists()
    measured.append(None)
    assert measure.measure_devices(file, options, repeats=1, write=True) == 1
    assert "error: a: its steps were not measured" in capsys.readouterr().err


def test_rounds_of_a_trial_run_are_shorter_if_a_step_takes_long() -> None:
    """All steps together take at most 45 s, or twice a step in each round."""
    law = AffineLaw(0.5, 0.0, 0.0, 0.0)
    assert measure.least_step_s(48, [law]) == 24.0
    assert measure.least_step_s(48, [law, law]) == 12.0
    assert [measure.steps_of(each) for each in (0.001, 1.5, 3.75, 12.0, 24.0)] == [8, 8, 3, 2, 2]
