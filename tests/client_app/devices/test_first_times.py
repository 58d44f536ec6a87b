"""A unit's first round starts from the measured step that is stored with its inventory."""

import json

import pytest
from federated import TINY
from step_laws import law_of

from client_app.control_unit import ControlUnit
from client_app.devices.known_devices import Devices
from collapipe.config import load_overrides
from collapipe.devices.kept_law import pack_law
from collapipe.inventory.measured_step import write_steps
from collapipe.runs.rows import build_tokenizer
from collapipe.wire.messages import STEP_LAW

NAMES = "jetson", "pi"
LAW = law_of(NAMES, m=2, head_s=0.02, blocks={"jetson": 3, "pi": 1})


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the options of a run on two boxes that have a measured step."""
    file = tmp_path_factory.mktemp("boxes") / "boxes.yaml"
    hardware = {"flops_per_s": 1e9, "d2d_rate_bps": 1e9, "address": "127.0.0.1:1"}
    devices = [{"name": name, **hardware} for name in NAMES]
    clusters = [{"name": "home", "devices": devices}]
    tree = {"batch_size": 6, "model": {"name": "transformer"}, "clusters": clusters}
    file.write_text(json.dumps(tree))  # JSON is also YAML
    own = (*TINY, "cluster=devices", f"cluster.file={file}", "federation.num_units=1")
    write_steps(file, load_overrides(own).tree, [LAW])
    return own


def unit(*options: str) -> tuple[ControlUnit, Devices]:
    settings = load_overrides(options)
    made = ControlUnit(settings, 0, build_tokenizer(settings))
    assert made.devices is not None
    return made, made.devices


def test_the_first_round_starts_from_the_measured_step(options: tuple[str, ...]) -> None:
    own, devices = unit(*options)
    own.recall_times({})
    assert devices.law == LAW


def test_later_rounds_and_resumed_runs_keep_their_own_law(options: tuple[str, ...]) -> None:
    own, devices = unit(*options)
    later = law_of(NAMES, m=2, head_s=0.03)
    own.recall_times({STEP_LAW: pack_law(later)})
    assert devices.law == later


def test_without_profiling_no_law_is_used_and_no_message_logged(
    options: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    own, devices = unit(*options, "pipeline.profile=false", "batch_size=8")
    own.recall_times({})
    assert devices.law is None
    assert not caplog.records


def test_a_measured_step_of_another_batch_size_is_reported_once(
    options: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    own, devices = unit(*options, "batch_size=8")
    for _ in range(2):
        own.recall_times({})
    assert devices.law is None
    (message,) = caplog.messages
    assert "another batch_size" in message and "device measure" in message
