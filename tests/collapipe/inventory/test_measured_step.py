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


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    file = tmp_path / "boxes.yaml"
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
    way = r"boxes\.yaml\.step\.json: (no measured steps|is longer)"
    with pytest.raises(ConfigError, match=way) as refused:
        read_step(boxes, TREE, 1, DEVICES)
    assert str(refused.value).count("measure again") == 1
