"""A checkpoint is read exactly as it was written, or it is refused."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.state import Estimates, unknown_cluster
from collapipe.tensors import Tensors
from collapipe.wire import kept_file
from collapipe.wire.compression.feedback import ActivationMemory
from collapipe.wire.messages import Failure
from server_app.checkpoints.file import PROGRESS, Checkpoint, Progress, flat, nested
from server_app.checkpoints.folder import CheckpointFolder
from server_app.planning.estimates import RoundObservation
from server_app.planning.scheduler import SchedulerState
from server_app.records.summary import History
from server_app.roster import Roster
from server_app.rounds.results import TrainingState
from server_app.world.environment import DeviceCondition, EnvironmentState, UnitCondition, Walk

NUMBER = st.floats(allow_nan=False)


def progress(round_: int = 3, numbers: Iterator[float] | None = None) -> Progress:
    """A ``Progress`` with a value in every field."""
    some = numbers or iter([0.1 * each for each in range(99)])
    device = DeviceCondition(next(some), False, next(some), next(some))
    walk = Walk(*(next(some) for _ in range(len(Walk.__dataclass_fields__))))
    unit = UnitCondition((device, device), walk, next(some), (next(some), next(some)))
    plan = ClusterPlan(1, (SegmentPlan("phone", Span(0, 2)),), 3, "gpipe", abs(next(some)))
    return Progress(
        round=round_,
        wall_s=next(some),
        tokenizer="ab",
        sizes={"metrics.jsonl": 2**40},
        scheduler=SchedulerState(
            roster=Roster((unknown_cluster(0), Failure("WireError", "nonsense"))),
            queues=(next(some), next(some)),
            losses=(None, next(some)),
            environment=EnvironmentState((unit, unit)),
            estimates=Estimates(next(some), None, next(some)),
            observation=RoundObservation(next(some), next(some), next(some)),
            clock_s=next(some),
        ),
        history=History(
            0.0, round_, [next(some)], energy_j=next(some), rounds=Counter({1: 2}), plans={1: plan}
        ),
        names={"paris": 1},
        frozen={"embedding": "ab"},
    )


def learned() -> TrainingState:
    """A ``TrainingState`` with tensors of all kinds, some of which share memory."""
    common = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    return TrainingState(
        weights={"embedding.weight": common, "n": torch.tensor(3)},
        own_models={1: {"embedding.weight": common, "t": common.t()}},
        server_optimizer={"embedding.weight/exp_avg": torch.tensor([math.nan, -0.0, 1e-45])},
        heads={-1: {"a/exp_avg": common[0]}, 2: {"a/exp_avg": torch.zeros(0)}},
        units={
            0: {"optimizer": {"b.c/step": torch.tensor(1.0)}, "residual": {"b.c": common[1]}},
            10: {"stem": {"kept": torch.ones(99, dtype=torch.bool)}},
        },
        activations={1: ActivationMemory(7, {4: common, 0: common[:0]}).pack()},
    )


def written(folder: Path, *rounds: int, keep: int = 9) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder)
    for number in rounds:
        name, state = f"{number:06}", learned()
        checkpoints.begin(name)
        for unit, kept in state.units.items():
            checkpoints.add(name, unit, kept)
        checkpoints.write(Checkpoint({"seed": 0}, progress(number), state), keep)
    return checkpoints


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
        for name, tensor in tensors.items()
    }


@given(st.lists(NUMBER, min_size=40, max_size=40))
def test_written_numbers_are_read_unchanged(numbers: list[float]) -> None:
    before = progress(numbers=iter(numbers))
    text = json.dumps(PROGRESS.dump_python(before, mode="json"))
    assert PROGRESS.validate_python(json.loads(text)) == before


def test_a_checkpoint_reads_as_it_was_written(tmp_path: Path) -> None:
    what = learned()
    found = written(tmp_path, 3).read("000003")
    assert (found.configuration, found.progress) == ({"seed": 0}, progress(3))
    assert bits(flat(found.training)) == bits(flat(what))
    assert [*found.training.units] == [0, 10]
    for unit, kept in what.units.items():
        assert found.training.units[unit].keys() == kept.keys()
        assert bits(kept_file.flat(found.training.units[unit])) == bits(kept_file.flat(kept))
    assert found.training.units.get(1) is None


FILES = "state.json", "tensors.safetensors", "unit-10.safetensors"


def same_content(one: bytes, other: bytes) -> bool:
    """Whether two JSON files have equal values; white space and exponents' case may differ."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_is_detected(tmp_path: Path, name: str) -> None:
    checkpoints, file = written(tmp_path, 3), tmp_path / "checkpoints" / "000003" / name
    sound, rng = file.read_bytes(), Random(0)
    for place in rng.sample(range(len(sound)), 60):
        changed = bytearray(sound)
        changed[place] ^= 1 << rng.randrange(7)
        if same_content(bytes(changed), sound):
            continue
        file.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"checkpoints/000003: (damaged, |has format )"):
            checkpoints.read("000003")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [None, 0, 100])
def test_a_truncated_or_missing_file_is_detected(
    tmp_path: Path, name: str, left: int | None
) -> None:
    checkpoints, file = written(tmp_path, 3), tmp_path / "checkpoints" / "000003" / name
    content = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(content[:left])
    with pytest.raises(ConfigError, match=f"000003: damaged, .*{name if left is None else ''}"):
        checkpoints.read("000003")


def test_another_format_is_named_with_its_version(tmp_path: Path) -> None:
    checkpoints, file = written(tmp_path, 3), tmp_path / "checkpoints" / "000003" / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "format": 9, "version": "9.1"}))
    with pytest.raises(ConfigError, match=r"has format 9 of CollaPipe 9\.1; .* CollaPipe 9\.1$"):
        checkpoints.read("000003")


@pytest.mark.parametrize("files", [2, [0], "x", None, [["state.json", 1]]])
def test_a_list_of_files_of_another_type_is_damage(tmp_path: Path, files: object) -> None:
    checkpoints, file = written(tmp_path, 3), tmp_path / "checkpoints" / "000003" / "state.json"
    state = {**json.loads(file.read_text()), "files": files}
    del state["sha256"]
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, **state}))
    with pytest.raises(ConfigError, match="000003: damaged"):
        checkpoints.read("000003")


def test_the_last_checkpoints_are_kept_and_the_link_names_the_newest(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 5, 10, 15, 20, keep=2)
    assert checkpoints.names() == ["000015", "000020"]
    assert (tmp_path / "checkpoints" / "latest").readlink() == Path("000020")
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_partly_written_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / ".000005.partial"
    partial.mkdir(parents=True)
    (partial / "state.json").write_text("{")
    assert CheckpointFolder(tmp_path).names() == []
    assert written(tmp_path, 5).names() == ["000005"]
    assert not partial.exists()


def test_a_checkpoint_is_synced_to_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    written(tmp_path, 5)
    partial = ".000005.partial"
    units = ["unit-0.safetensors", "unit-10.safetensors"]
    assert synced == [*units, "tensors.safetensors", "state.json", partial, "checkpoints"]


def test_rounds_beyond_a_million_are_the_newest(tmp_path: Path) -> None:
    assert written(tmp_path, 999_999, 1_000_000, keep=1).names() == ["1000000"]


def test_rewinding_removes_later_checkpoints(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2, 3, 4)
    checkpoints.rewind("000003", keep=2)
    assert checkpoints.names() == ["000002", "000003"]
    assert (tmp_path / "checkpoints" / "latest").readlink() == Path("000003")


@pytest.mark.parametrize("name", ["model/x", "own_models.one/x", "units.1.x/y", "weights.1/x"])
def test_a_tensor_with_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown tensor|invalid literal"):
        nested({name: torch.zeros(1)})
