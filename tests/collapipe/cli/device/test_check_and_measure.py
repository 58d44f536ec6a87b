"""``collapipe device check`` and ``measure`` on real daemons."""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from device_cluster import Work, daemons, plan_of
from federated import TINY, run
from pydantic import TypeAdapter
from run_files import rounds_of

from collapipe import __version__
from collapipe.cli.device import measure, survey, trial_round, trial_run
from collapipe.cli.device.hop_times import Trip
from collapipe.cli.device.measure import Measuring
from collapipe.cli.device.survey import SurveyedDevice, ask_all
from collapipe.cli.device.trial_round import Trial
from collapipe.devices.fitting import Fit
from collapipe.errors import ConfigError, LinkError, NonFiniteLossError
from collapipe.inventory.file import read_inventory
from collapipe.inventory.measured_step import step_file
from collapipe.run_report.packed import read_requests
from collapipe.runs.reading import read_run
from collapipe.step_law import StepLaw
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.streams.channels import Dialer
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.control_unit import placement
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.devices.daemon.server import Daemon

Command = Callable[..., tuple[int, str, str]]
SIZES = """\
batch_size: 64 # of a box
model: {name: dates_transformer, num_blocks: 4, tokens: 12}
"""
DEVICE = """\
      - name: {name} # a box
        address: {address}
        flops_per_s: 1.0e10 # assumed
        d2d_rate_bps: 8.0e9
        memory_bytes: 1.0e9
"""


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_FEWEST", 2)
    monkeypatch.setattr(measure, "_MOST", 2)
    monkeypatch.setattr(trial_run, "_MOST_STEPS", 2)


@pytest.fixture
def known_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices time their blocks, but laws are fitted to known times.

    On a busy machine, many samples may take no longer than one, which ``measure`` refuses.
    """

    def taken(
        device: DeviceAddress, dialer: Dialer, trial: Trial, blocks: int
    ) -> list[list[float]]:
        timed = trial_round.chunk_seconds(device, dialer, trial, blocks)
        assert [len(each) for each in timed] == [trial.repeats] * len(trial.samples)
        return [[1e-3 * blocks * size] * trial.repeats for size in trial.samples]

    monkeypatch.setattr(measure, "chunk_seconds", taken)


def inventory(folder: Path, running: Sequence[Daemon], credentials: str = "") -> Path:
    """An inventory file with these daemons."""
    file = folder / "boxes.yaml"
    devices = (
        DEVICE.format(name=f"device-{k}", address=each.address) for k, each in enumerate(running)
    )
    head = f"credentials: {credentials}\n" if credentials else ""
    file.write_text(f"{head}{SIZES}clusters:\n  - name: desk\n    devices:\n{''.join(devices)}")
    return file


def test_a_pass_disturbed_by_other_work_still_gives_a_fit() -> None:
    own = SimpleNamespace(trial=SimpleNamespace(samples=(1, 8)))
    times = {(1, 1): [0.1, 0.9], (1, 8): [0.2, 2.0]}
    found = Measuring._fit(cast(Any, own), cast(Any, SimpleNamespace(name="box")), times)
    assert isinstance(found, Fit)


@pytest.mark.usefixtures("known_chunks")
def test_devices_are_checked_measured_planned_and_trained_on(
    command: Command, tmp_path: Path
) -> None:
    with daemons(2, folder=tmp_path / "own") as running:
        file = inventory(tmp_path, running, "own/control-unit")
        status, out, _ = command("device", "check", file)
        assert status == 0
        assert all(name in out for name in ("device-0 -> device-1", "device-1 -> control unit"))
        before = file.read_text()
        status, out, _ = command("device", "measure", file, "--repeats", 3, "--write")
        assert status == 0
        assert len(re.findall(r"^device-\d +\S+ [mu]?s .*%$", out, re.MULTILINE)) == 2
        assert re.findall("#.*", file.read_text()) == re.findall("#.*", before)
        profiles = read_inventory(file).clusters[0].profiles
        assert all(each.time.u > 0 and each.time.w + each.time.ell > 0 for each in profiles)
        status, out, _ = command("plan", file, "--json")
        assert status == 0
        (planned,) = json.loads(out)["clusters"]
        assert sum(each["blocks"] for each in planned["segments"]) == 4
        options = ["cluster=devices", f"cluster.file={file}", "federation.num_units=1"]
        with pytest.raises(ConfigError, match="another model"):
            run(tmp_path / "refused", *options)
        options_of_run = (*TINY, *options, "batch_size=64")  # a larger batch is easier to time
        status, *_ = command("device", "measure", file, *options_of_run, "--repeats", 3, "--write")
        assert status == 0
        assert run(tmp_path / "run", *options, "batch_size=64", "federation.rounds=1")
        (step,) = json.loads(step_file(file).read_text())["steps"]
        first, *_ = read_requests(read_run(tmp_path / "run"))
        assert first.clusters[0].step == TypeAdapter(StepLaw).validate_python(step)
        law = first.clusters[0].step
        other, spread = law.num_micro_batches // 2, law.spread
        assert other in {each.num_micro_batches for each in law.measured}
        (line, *_) = rounds_of(tmp_path / "run")
        assert line["cost"]["clusters"][0]["spread"] == spread
        status, _, err = command("plan", file)
        assert status == 2 and "another model" in err


@pytest.mark.usefixtures("known_chunks")
def test_a_slow_link_is_measured_and_does_not_slow_the_usual_hops(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, byte_s = FrameStream.send, 2e-6

    def slow(stream: FrameStream, frame: Frame) -> None:
        if frame.kind == FrameKind.ACTIVATION and stream.peer.startswith("device-0 ("):
            time.sleep(byte_s * sum(each.nbytes for each in frame.tensors))
        send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow)
    with daemons(2) as running:
        file = inventory(tmp_path, running)
        with file.open("a") as stream:
            stream.write(
                "    links: [{between: [device-1, device-0], d2d_rate_bps: 1.0e3}] # slow\n"
            )
        status, out, _ = command("device", "measure", file, "--repeats", 1, "--write")
    assert status == 0
    assert len(re.findall(r"^device-1 - device-0 .*%$", out, re.MULTILINE)) == 1
    profiles = read_inventory(file).clusters[0].profiles
    for each in profiles:
        (link,) = each.links
        assert each.time.w < link.w / 2
    (rate_bps,) = re.findall(r"d2d_rate_bps: (\S+)}\] # slow\n$", file.read_text())
    assert float(rate_bps) == pytest.approx(2 * 8 / byte_s, rel=0.5)  # both ways


def test_the_json_of_a_check_has_names_and_numbers(command: Command, tmp_path: Path) -> None:
    with daemons(2) as running:
        status, out, _ = command("device", "check", inventory(tmp_path, running), "--json")
    report = json.loads(out)
    assert (status, report["version"]) == (0, __version__)
    for number, device in enumerate(report["devices"]):
        own = device["status"]
        assert (device["cluster"], device["name"]) == ("desk", f"device-{number}")
        assert (device["error"], own["busy"], own["expires"]) == (None, False, None)
        assert own["memory_bytes"] == 1e9 and own["flops_per_s"] > 0
    ways = [(hop["source"], hop["target"]) for hop in report["hops"]]
    names = ["control unit", "device-0", "device-1", "control unit"]
    assert ways == list(pairwise(names))
    assert all(hop["round_trip_s"] > 0 and hop["error"] is None for hop in report["hops"])


@pytest.mark.usefixtures("known_chunks")
def test_each_failing_device_has_an_error_line(command: Command, tmp_path: Path) -> None:
    with daemons(2, folder=tmp_path / "own") as running:
        file = inventory(tmp_path, running, "own/control-unit")
        text = file.read_text().replace(running[0].address, "127.0.0.1:1")
        text += DEVICE.format(name="device-9", address=running[1].address)
        text += "      - {name: shelf, flops_per_s: 1.0e9, d2d_rate_bps: 1.0e9}\n"
        file.write_text(text)
        status, out, err = command("device", "check", file, "--json")
        assert status == 1
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        faulty = ("device-0", "device-9", "shelf")
        assert len(errors) == 3
        assert all(name in line for name, line in zip(faulty, errors, strict=True))
        report = json.loads(out)
        assert [each["error"] is None for each in report["devices"]] == [False, True, False, False]
        assert report["hops"][0]["round_trip_s"] is None
        assert all(each["round_trip_s"] is None and not each["error"] for each in report["hops"])
        before = file.read_text()
        status, out, err = command("device", "measure", file, "--repeats", 1)
        assert (status, file.read_text()) == (1, before)
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 4


def test_another_version_is_an_error_and_an_expiring_certificate_a_warning(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemons(1, folder=tmp_path / "own") as running:
        file = inventory(tmp_path, running, "own/control-unit")
        monkeypatch.setattr("collapipe.credentials.member._SOON", timedelta(days=40))
        status, _, err = command("device", "check", file)
        assert status == 0
        assert [line.split(": ")[:2] for line in err.splitlines()] == [
            ["warning", "device-0"],
            ["warning", "control unit"],
        ]
        monkeypatch.setattr("collapipe.cli.device.survey.__version__", "9.9.9")
        status, _, err = command("device", "check", file)
        assert status == 1 and "9.9.9" in err and __version__ in err


def test_a_device_with_less_memory_than_in_the_file_is_a_warning(
    command: Command, tmp_path: Path
) -> None:
    with daemons(1) as running:
        file = inventory(tmp_path, running)
        file.write_text(file.read_text().replace("memory_bytes: 1.0e9", "memory_bytes: 2.0e9"))
        status, _, err = command("device", "check", file)
    assert status == 0
    assert err.startswith("warning: device-0: ") and "1 GB" in err and "2 GB" in err


def test_a_busy_device_passes_the_check_and_is_not_measured(
    command: Command, tmp_path: Path
) -> None:
    with daemons(1) as running:
        file = inventory(tmp_path, running)
        with Work().segments(plan_of(["device-0"], (4,)), running):
            status, out, _ = command("device", "check", file, "--json")
            report = json.loads(out)
            own = report["devices"][0]["status"]
            assert (status, own["busy"], own["span"]) == (0, True, {"first": 0, "blocks": 4})
            assert [hop["round_trip_s"] for hop in report["hops"]] == [None, None]
            status, _, err = command("device", "measure", file, "--write")
            assert status == 1 and "device-0" in err
        assert "chunk" not in file.read_text()


@pytest.mark.usefixtures("known_chunks")
def test_a_single_device_with_room_for_one_block_is_measured(
    command: Command, tmp_path: Path
) -> None:
    """The device's hop is also measured, and the command's options describe the model."""
    with daemons(1) as running:
        file = inventory(tmp_path, running)
        text = file.read_text().replace("name: dates_transformer", "block_bytes: 4.0e7")
        file.write_text(
            text.replace(", tokens: 12", "").replace("1.0e9", "1.0e9\n        max_blocks: 1")
        )
        status, _, err = command("device", "measure", file)
        assert status == 2 and "model" in err
        status, _, err = command("device", "measure", file, "model=transformr")
        assert status == 2 and "transformer" in err
        options = ("model.dim=96", "task.train_rows=640", "--repeats", 3, "--write")
        status, _, err = command("device", "measure", file, *options)
        assert "chunk: {u: " in file.read_text(), (status, err)
        assert status and "6 blocks" in err  # this device cannot train the model
        assert not step_file(file).exists()


@pytest.mark.usefixtures("known_chunks")
def test_a_hop_that_cannot_be_dialled_does_not_affect_other_hops(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three devices cannot dial the second."""
    monkeypatch.setattr(placement, "SILENT_S", 0.0)  # so that the error has another cause
    dial = Daemon._dial

    def unable(self: Daemon, neighbour: DeviceAddress, *how: str) -> FrameStream:
        if neighbour.name == "device-1":
            raise LinkError("device-1: timed out")
        return dial(self, neighbour, *how)

    monkeypatch.setattr(Daemon, "_dial", unable)
    with daemons(3) as running:
        file = inventory(tmp_path, running)
        status, out, err = command("device", "check", file, "--json")
        reached = [hop["round_trip_s"] is not None for hop in json.loads(out)["hops"]]
        assert (status, reached) == (1, [True, False, True, True])
        assert err.startswith("error: device-0 -> device-1: ") and "timed out" in err
        status, _, err = command("device", "measure", file, "--repeats", 1)
        assert status == 1 and len(re.findall("^error: device-0: ", err, re.MULTILINE)) == 1


def test_a_device_lost_in_a_trial_does_not_affect_other_hops(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Daemon._hold

    def unable(self: Daemon, *what: Any) -> HeldSegment:
        if self is running[1]:
            raise ConfigError("no memory")
        return hold(self, *what)

    with daemons(3) as running:
        monkeypatch.setattr(Daemon, "_hold", unable)
        status, out, err = command("device", "check", inventory(tmp_path, running), "--json")
    reached = [hop["round_trip_s"] is not None for hop in json.loads(out)["hops"]]
    assert (status, reached) == (1, [True, False, False, True])
    assert err.count("no memory") == 2


def test_a_device_busy_after_its_status_does_not_affect_other_hops(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command does not wait long for a busy device and reports no error."""
    monkeypatch.setattr(trial_round, "_BUSY_S", 0.5)
    with daemons(3) as running, ExitStack() as stack:

        def busy_afterwards(*options: Any) -> list[list[SurveyedDevice]]:
            found = ask_all(*options)
            stack.enter_context(Work().segments(plan_of(["device-0"], (4,)), [running[1]]))
            return found

        monkeypatch.setattr(survey, "ask_all", busy_afterwards)
        file = inventory(tmp_path, running)
        began = time.monotonic()
        status, out, err = command("device", "check", file)
        assert time.monotonic() - began < 20.0
    assert (status, err) == (0, "")
    busy = [line.split()[-2] == "busy" for line in out.splitlines() if " -> " in line]
    assert busy == [False, True, True, False]


def test_an_error_that_names_no_device_fails_only_its_hops(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(self: Daemon, *what: Any) -> HeldSegment:
        raise NonFiniteLossError("a gradient is not finite")

    with daemons(1) as running:
        monkeypatch.setattr(Daemon, "_hold", unable)
        status, out, err = command("device", "check", inventory(tmp_path, running), "--json")
    report = json.loads(out)
    assert (status, report["devices"][0]["error"]) == (1, None)
    assert ["not finite" in hop["error"] for hop in report["hops"]] == [True, True]
    assert err.count("error: ") == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_round_trip_times_are_errors_of_their_hops(
    seconds: float, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = [[Trip(128, 0.1), Trip(256, 0.2)], [Trip(128, 0.1), Trip(256, seconds)]]
    monkeypatch.setattr(survey, "hop_trips", lambda *what: trips)
    with daemons(1) as running:
        status, out, _ = command("device", "check", inventory(tmp_path, running), "--json")
    assert status == 1
    assert [hop["error"] is None for hop in json.loads(out)["hops"]] == [True, False]


def test_hops_are_timed_on_devices_with_little_memory(command: Command, tmp_path: Path) -> None:
    with daemons(2, memory_bytes=1e6) as running:
        file = inventory(tmp_path, running)
        file.write_text(file.read_text().replace("memory_bytes: 1.0e9", "memory_bytes: 1.0e6"))
        status, out, err = command("device", "check", file, "--json")
    assert (status, err) == (0, "")
    assert all(hop["round_trip_s"] for hop in json.loads(out)["hops"])
