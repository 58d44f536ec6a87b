"""Runs on daemons have the same bits as runs with simulated devices."""

import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import federated
import pytest
import torch
from device_cluster import daemons
from run_files import rounds_of
from torch import Tensor

from client_app.node import cached_units
from collapipe.cli.status import describe
from collapipe.errors import ConfigError
from collapipe.run_report.page import run_page
from collapipe.run_report.trace import draw, read_trace, write_trace
from collapipe.runs.reading import read_run
from pipeline.devices import hops
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.daemon import session
from pipeline.devices.daemon.server import Daemon

# No profiles: measured laws would give each run its own plans.
STEADY = "pipeline.profile=false", "strategy=all", "federation.num_units=1"
PARTS = "compute_s", "wait_s", "send_alone_s"  # parts of a device's time


@pytest.fixture(autouse=True)
def unadvised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the advice to use one process: it depends on the machine's load."""
    monkeypatch.setattr("client_app.devices.round_pipeline.without_devices", lambda *_: None)


def inventory(
    file: Path,
    there: Sequence[Daemon],
    flops_per_s: float = 1e9,
    max_blocks: int = 2,
    **seconds: float,
) -> Path:
    """Write the inventory of a cluster of these daemons, each with at most ``max_blocks``."""
    devices = [
        {
            "name": f"device-{k}",
            "address": daemon.address,
            "flops_per_s": flops_per_s,
            "d2d_rate_bps": 1e9,
            "max_blocks": max_blocks,
            **seconds,
        }
        for k, daemon in enumerate(there)
    ]
    tree = {
        "batch_size": 6,
        "model": {"name": "transformer"},
        "clusters": [{"name": "here", "devices": devices}],
    }
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is also YAML
    return file


def run_on_devices(
    run_dir: Path, file: Path, *options: str, lost: Collection[str] = ()
) -> dict[str, Tensor]:
    """Run on real devices. Fails unless exactly the devices ``lost`` were lost: equal bits do not
    show a loss."""
    trained = federated.run(run_dir, "cluster=devices", f"cluster.file={file}", *options)
    assert lost_devices(run_dir) == set(lost)
    return trained


def lost_devices(run_dir: Path) -> set[str]:
    """Return the devices that a round lost, or was planned without."""
    events = json.dumps([line["events"] for line in rounds_of(run_dir)])
    found = re.findall(r"(?:\"lost|;) (device-\d) \(|planned without (device-\d):", events)
    return {name for names in found for name in names if name}


def held(line: dict[str, Any]) -> dict[str, int]:
    """Return the number of blocks of each device in a round's plan."""
    (cluster,) = line["plan"]["clusters"]
    return {each["device"]: each["span"]["blocks"] for each in cluster["segments"]}


def plans(run_dir: Path) -> list[Any]:
    """Return segments and number of micro-batches of each round."""
    clusters = [line["plan"]["clusters"][0] for line in rounds_of(run_dir)]
    return [(each["segments"], each["num_micro_batches"]) for each in clusters]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Check that names and values are equal."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["decoder.mode=per_cluster"], marks=pytest.mark.thorough),
        ["decoder.mode=control_unit", "pipeline=one_f_one_b", "pipeline.recompute=true"],
    ],
    ids=" ".join,
)
def test_a_run_on_daemons_equals_the_run_in_one_process(tmp_path: Path, chosen: list[str]) -> None:
    """Two rounds on three devices, with the decoder on the server or the control unit. Each device
    reports its measured times."""
    options = *STEADY, *chosen
    with daemons(3) as there:
        file = inventory(tmp_path / "here.yaml", there)
        real = run_on_devices(tmp_path / "real", file, *options)
    simulated = federated.run(
        tmp_path / "simulated", "cluster=file", f"cluster.file={file}", *options
    )
    assert plans(tmp_path / "real") == plans(tmp_path / "simulated")
    assert_same(real, simulated)
    for line in rounds_of(tmp_path / "real"):
        measured = {each["name"]: each for each in line["devices"]["0"]}
        assert {name: each["blocks"] for name, each in measured.items()} == held(line)
        for each in measured.values():
            assert sum(each[part] for part in PARTS) <= each["span_s"] * (1 + 1e-6)
        assert line["events"] == {}
    page = run_page(read_run(tmp_path / "real"), None)
    last = rounds_of(tmp_path / "real")[-1]
    for each in last["devices"]["0"]:
        assert f"unit 0, {each['name']}" in page
    lines = describe(read_run(tmp_path / "real"), 0.0)
    named = {text.partition(" of ")[0] for label, text in lines if label == "device"}
    assert named == {f"device-{k}" for k in range(len(held(last)))}


def test_vanilla_fl_on_daemons_is_one_shared_stage(tmp_path: Path) -> None:
    """Each device trains all blocks on a third of the rows. In one process the unit trains all rows
    at once, with different rounding."""
    own = "framework=vanilla_fl", "model.dropout=0", "optimizer=sgd", "federation.rounds=1"
    options = *STEADY, *own
    with daemons(3) as there:
        file = inventory(tmp_path / "here.yaml", there, max_blocks=4)
        real = run_on_devices(tmp_path / "real", file, *options)
    simulated = federated.run(
        tmp_path / "simulated", "cluster=file", f"cluster.file={file}", *options
    )
    (line,) = rounds_of(tmp_path / "real")
    (cluster,) = line["plan"]["clusters"]
    (segment,) = cluster["segments"]
    names, measured = [f"device-{k}" for k in range(3)], line["devices"]["0"]
    assert segment["span"] == {"first": 0, "blocks": 4}
    assert segment["shares"] == [{"device": name, "rows": 2} for name in names]
    assert {each["name"]: each["blocks"] for each in measured} == dict.fromkeys(names, 4)
    assert 0 < max(each["compute_s"] for each in measured) < line["pipeline_s"]["0"]
    torch.testing.assert_close(real, simulated, rtol=0, atol=1e-6)


@contextmanager
def ending(daemon: Daemon, at: int) -> Iterator[None]:
    """End the daemon before the ``at``-th batch of the run."""
    real, batches = RemoteSegments.run, iter(range(1, 1000))

    def run(self: RemoteSegments, *arguments: Any) -> None:
        if next(batches) == at:
            thread = threading.Thread(target=daemon._server.stop, args=(None,))
            thread.start()
            thread.join()
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteSegments, "run", run)
        yield


def test_losing_a_device_changes_no_bit_and_later_plans_omit_it(tmp_path: Path) -> None:
    # one micro-batch: plans with and without the device must have equally many
    options = *STEADY, "federation.rounds=3", "pipeline.num_micro_batches=1"
    with daemons(3) as there:
        file = inventory(tmp_path / "here.yaml", there)
        with ending(there[1], at=2):
            real = run_on_devices(tmp_path / "real", file, *options, lost=["device-1"])
    simulated = federated.run(
        tmp_path / "simulated", "cluster=file", f"cluster.file={file}", *options
    )
    first, *later = rounds_of(tmp_path / "real")
    assert "device-1" in held(first) or len(held(first)) == 2
    assert all("device-1" not in held(line) for line in later)
    if "device-1" in held(first):
        (event,) = first["events"]["0"]
        assert "device-1" in event
    (reason,) = later[0]["events"]["0"]
    assert "planned without device-1" in reason and "Connection refused" in reason
    assert all(each.address not in json.dumps(rounds_of(tmp_path / "real")) for each in there)
    assert later[1]["events"] == {}
    assert_same(real, simulated)


@pytest.mark.parametrize(
    ("max_blocks", "own", "planned"),
    [
        (3, ["pipeline.num_segments=2"], [{"device-0": 3, "device-1": 1}] * 2),
        (4, ["framework=vanilla_fl"], [{"device-0": 4}] * 2),
    ],
    ids=["pipeline", "shared"],
)
def test_a_device_that_refuses_blocks_for_its_memory_gets_fewer(
    tmp_path: Path, max_blocks: int, own: list[str], planned: list[dict[str, int]]
) -> None:
    """The inventory allows the blocks, but the device's memory limit does not. With at most three
    blocks the other device cannot replace it."""
    with daemons(2) as (whole, scarce):
        scarce._settings = replace(scarce._settings, memory_bytes=300e3)
        file = inventory(tmp_path / "here.yaml", [whole, scarce], max_blocks=max_blocks)
        options = *STEADY, "federation.rounds=3", *own
        run_on_devices(tmp_path / "run", file, *options)
    first, *later = rounds_of(tmp_path / "run")
    (event,) = first["events"]["0"]
    assert event.startswith("device-1 holds at most ") and "blocks need " in event
    assert [held(line) for line in later] == planned
    assert [line["events"] for line in later] == [{}, {}]


def test_the_number_of_micro_batches_survives_a_loss(tmp_path: Path) -> None:
    """Plans use measured times. A device alone would be faster with one micro-batch: each
    micro-batch has a fixed launch time per block and a fixed hop time."""
    options = "strategy=all", "federation.num_units=1", "decoder.mode=control_unit"
    fixed_s = {"launch_s": 7e-4, "hop_latency_s": 1e-3}
    with daemons(2) as there:
        file = inventory(tmp_path / "here.yaml", there, max_blocks=4, **fixed_s)
        with ending(there[1], at=2):
            real = run_on_devices(tmp_path / "real", file, *options, lost=["device-1"])
    kept = federated.run(tmp_path / "kept", "cluster=file", f"cluster.file={file}", *options)
    first, second = rounds_of(tmp_path / "real")
    assert (len(held(first)), len(held(second))) == (2, 1)
    assert {m for _, m in plans(tmp_path / "real") + plans(tmp_path / "kept")} == {2}
    assert_same(real, kept)


def test_shares_survive_a_loss(tmp_path: Path) -> None:
    """In the next round another device trains the lost device's rows as a separate share. Otherwise
    two devices would have half of the rows each."""
    options = *STEADY, "framework=vanilla_fl", "decoder.mode=control_unit"
    found = []
    for name, lost in (("whole", []), ("lost", ["device-1"])):
        with daemons(3) as there:
            file = inventory(tmp_path / f"{name}.yaml", there, max_blocks=4)
            with ending(there[1], at=2 if lost else 0):
                found.append(run_on_devices(tmp_path / name, file, *options, lost=lost))
    (segment,) = rounds_of(tmp_path / "lost")[-1]["plan"]["clusters"][0]["segments"]
    assert [each["rows"] for each in segment["shares"]] == [2, 2, 2]
    assert "device-1" not in {each["device"] for each in segment["shares"]}
    assert_same(*found)


def test_frozen_weights_are_sent_to_a_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, the second round sends only trained weights. Files that were damaged in place
    before another run on the same daemons are not used."""
    sent, sizes = list[str](), list[int]()
    real_packed = Replica.packed

    def packed(self: Replica, name: str, keys: Collection[str]) -> Tensor:
        part = real_packed(self, name, keys)
        if not any("/" in key for key in keys):  # weights, small enough for one part
            sent.append(name)
            sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(Replica, "packed", packed)
    options = *STEADY, "adapter=lora", "adapter.rank=2"
    with daemons(2) as there:
        file = inventory(tmp_path / "here.yaml", there)
        real = run_on_devices(tmp_path / "real", file, *options)
        kept = [*Path(os.environ["XDG_CACHE_HOME"]).rglob("devices/*/*.safetensors")]
        for each in kept:
            with each.open("r+b") as damaged:
                damaged.seek(-4, os.SEEK_END)
                damaged.write(b"1234")
        again = run_on_devices(tmp_path / "again", file, *options)
    assert len(kept) == 4 and len(sent) == 16
    assert_same(real, again)
    blocks = [f"blocks.{index}" for index in range(4)]
    first, second, third = (sorted(sent[k : k + 4]) for k in (0, 4, 8))  # one thread per device
    assert first == second == third == blocks
    assert max(sizes[4:8]) < min(sizes[:4]) == min(sizes[8:12])
    simulated = federated.run(
        tmp_path / "simulated", "cluster=file", f"cluster.file={file}", *options
    )
    assert_same(real, simulated)


def test_a_device_that_cannot_store_frozen_weights_trains_with_the_received_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cache := tmp_path / "cache").touch()  # a file in place of the folder
    options = *STEADY, "adapter=lora", "adapter.rank=2", "federation.rounds=1"
    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            there = stack.enter_context(daemons(2))
        file = inventory(tmp_path / "here.yaml", there)
        real = run_on_devices(tmp_path / "real", file, *options)
    own = "cluster=file", f"cluster.file={file}"
    assert_same(real, federated.run(tmp_path / "simulated", *own, *options))
    assert sum("will be sent again" in each for each in caplog.messages) == 4


def test_measured_times_far_from_the_plan_change_the_next_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The inventory's speeds are far too low. The second round's plan uses measured times, also if
    new units resume from the checkpoint."""
    run_dir = tmp_path / "run"
    with daemons(2) as there:
        file = inventory(tmp_path / "here.yaml", there, 1e6)
        own = "strategy=all", "federation.num_units=1", "cluster=devices", f"cluster.file={file}"
        for rounds, resume in ((1, None), (2, "000001")):
            options = *own, "federation.checkpoint_every=1", f"federation.rounds={rounds}"
            settings = federated.settings_of(run_dir, options)
            federated.train(federated.grid_of(settings), settings, resume)
            cached_units.cache_clear()
    assert lost_devices(run_dir) == set()
    first, second = rounds_of(run_dir)
    planned = [each["cost"]["clusters"][0]["pipeline_s"] for each in (first, second)]
    assert planned[0] > 10 * first["pipeline_s"]["0"]
    assert planned[1] == pytest.approx(first["pipeline_s"]["0"], rel=0.01)
    cuts = [held(each) for each in (first, second)]
    assert cuts[0] == cuts[1] and not second["events"]
    assert "have changed since the checkpoint" not in caplog.text


def test_a_trace_has_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices' clocks are an hour ahead; in the trace, each tensor arrives after it was
    sent."""
    for module in (session, hops):
        monkeypatch.setattr(module, "time", _Skewed(3600.0))
    with daemons(3) as there:
        file = inventory(tmp_path / "here.yaml", there)
        options = *STEADY, "pipeline=one_f_one_b", f"pipeline.num_micro_batches={(m := 4)}"
        run_on_devices(tmp_path / "run", file, *options)
    trace, written = read_trace(tmp_path / "run", None), tmp_path / "trace.json"
    write_trace(trace, written)
    assert trace.round == 2
    events = json.loads(written.read_text(encoding="utf-8"))["traceEvents"]
    arrows: dict[str, dict[str, float]] = {}
    for each in events:
        if each["ph"] in "sf":
            arrows.setdefault(each["id"], {})[each["ph"]] = each["ts"]
    steps, stages = 2, len(held(rounds_of(tmp_path / "run")[1]))
    assert len(arrows) == 2 * m * steps * (stages + 1)  # also to and from the control unit
    assert all(ends["f"] >= ends["s"] - trace.error_s * 1e6 for ends in arrows.values())
    compute = [each for each in events if each["ph"] == "X" and each["tid"] == 1]
    assert len(compute) == 2 * m * steps * (stages + 2)  # also of the embedding and the head
    assert all(0 <= each["ts"] < 60e6 for each in compute)
    with pytest.raises(ConfigError, match="exists"):
        write_trace(trace, written)
    with pytest.raises(ConfigError, match="no round 7"):
        read_trace(tmp_path / "run", 7)
    draw(trace, tmp_path / "trace.svg")
    drawn = (tmp_path / "trace.svg").read_text(encoding="utf-8")
    assert all(f"device-{k}" in drawn for k in range(stages))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(trace, tmp_path / "folder.png")


class _Skewed:
    """A clock that is ahead by ``by_s``."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def monotonic(self) -> float:
        """Return another machine's time."""
        return time.monotonic() + self._by_s
