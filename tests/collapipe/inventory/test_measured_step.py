"""Measured steps are saved in a file next to the inventory; unusable files are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from step_laws import law_of

from collapipe.errors import ConfigError
from collapipe.inventory.measured_step import read_step, step_file, write_steps

DEVICES = "jetson", "pi"
TREE: dict[str, Any] = {
    "batch_size": 64,
    "model": {"dim": 64, "dropout": 0.1},
    "pipeline": {"num_micro_batches": 4, "schedule": "gpipe", "profile": None},
    "seed": 0,
}
PLAN = '{"stages": [], "num_micro_batches": 1, "step_s": 1.0, "weight": 1.0}'
STEP = law_of(DEVICES, head_s=0.02, blocks={"pi": 3})

INVENTORY = """
batch_size: 64
model: {name: transformer}
clusters:
  - {name: away, devices: [{name: one, chunk: {u: 0.3}}]}
  - name: home
    links: [{between: [jetson, pi], d2d_rate_bps: 2e9}]
    devices:
      - {name: jetson, chunk: {u: 0.1, w: 1e-3, l: 0, block_flops: 5e6}, address: "127.0.0.1:1"}
      - {name: pi, flops_per_s: 1e9, d2d_rate_bps: 3e9, memory_bytes: 1e9}
"""


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    file = tmp_path / "boxes.yaml"
    file.write_text(INVENTORY)
    written = write_steps(file, TREE, [None, STEP])
    assert written == step_file(file) == tmp_path / "boxes.yaml.step.json"
    return file


def test_a_written_step_is_read_back_unchanged(boxes: Path, tmp_path: Path) -> None:
    assert read_step(boxes, TREE, 1, DEVICES) == STEP
    again = TREE | {"seed": 1, "pipeline": TREE["pipeline"] | {"profile": True}}
    assert read_step(boxes, again, 1, DEVICES[::-1]) == STEP
    assert read_step(tmp_path / "other.yaml", TREE, 1, DEVICES) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 32}, "batch_size;"),
        ({"model": {"dim": 256, "dropout": 0.1}, "decoder": {"mode": "shared"}}, "model, decoder;"),
        ({"pipeline": {"num_micro_batches": 8, "schedule": "gpipe"}}, "num_micro_batches;"),
    ],
    ids=str,
)
def test_a_step_measured_with_other_options_is_refused(
    boxes: Path, change: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_step(boxes, TREE | change, 1, DEVICES)
    assert f"collapipe device measure {boxes} OPTIONS --write" in str(refused.value)


@pytest.mark.parametrize(
    ("place", "devices"), [(0, DEVICES), (2, DEVICES), (1, ("jetson",)), (1, (*DEVICES, "new"))]
)
def test_a_step_measured_with_other_devices_is_refused(
    boxes: Path, place: int, devices: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="not measured with jetson"):
        read_step(boxes, TREE, place, devices)


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        ("u: 0.1", "u: 0.2", False),
        ("w: 1e-3, ", "w: 2e-3, ", False),
        ("block_flops: 5e6", "block_flops: 6e6", False),
        ("flops_per_s: 1e9", "flops_per_s: 2e9", False),
        ("d2d_rate_bps: 3e9", "d2d_rate_bps: 3e9, launch_s: 1", False),
        ("d2d_rate_bps: 2e9", "d2d_rate_bps: 3e9", False),
        ("u: 0.3", "u: 0.4", True),  # another cluster
        ("127.0.0.1:1", "127.0.0.1:2", True),
        ("memory_bytes: 1e9", "memory_bytes: 2e9", True),
        ("u: 0.1", "u: 1.0e-1", True),
    ],
)
def test_a_step_is_refused_after_a_change_of_the_figures_that_it_is_relative_to(
    boxes: Path, old: str, new: str, fits: bool
) -> None:
    assert INVENTORY.count(old) == 1
    boxes.write_text(INVENTORY.replace(old, new))
    if fits:
        assert read_step(boxes, TREE, 1, DEVICES) == STEP
    else:
        with pytest.raises(ConfigError, match=r"measured with other figures .* measure again"):
            read_step(boxes, TREE, 1, DEVICES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".*", ""),
        (".*", "[" * 100_000),
        ("}$", ""),
        ("$", " " * 2**20),
        ('"steps": .*', '"steps": [1]}'),
        ('"factor": 1.0', '"factor": -1.0'),
        ('"host": "here"', '"host": "there"'),
        ('"slowness": 1.0', '"slowness": -1'),
        ('"slowness": 1.0', '"slowness": NaN'),
        (r'"measured": \[\]', f'"measured": [{PLAN}]'),
    ],
    ids=["empty", "deep", "cut", "long", "kind", "factor", "host", "negative", "nan", "schedule"],
)
def test_a_damaged_file_is_refused(boxes: Path, old: str, new: str) -> None:
    text = json.dumps(json.loads(step_file(boxes).read_text()))
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    step_file(boxes).write_text(changed)
    way = r"boxes\.yaml\.step\.json: (not measured steps|is longer)"
    with pytest.raises(ConfigError, match=way) as refused:
        read_step(boxes, TREE, 1, DEVICES)
    assert str(refused.value).count("measure again") == 1
