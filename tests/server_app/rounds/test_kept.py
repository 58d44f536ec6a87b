"""A checkpoint accepts only states that a unit can have after its steps."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message
from resumed import World, differing
from sections import section
from torch import Tensor

from client_app.app import app as units
from collapipe.config import Settings
from collapipe.errors import WireError
from collapipe.sections import LoraSettings
from collapipe.state import AffineLaw, ClusterState, DeviceProfile
from collapipe.wire import records
from collapipe.wire.compression.feedback import ActivationMemory
from collapipe.wire.kept_file import flat
from collapipe.wire.messages import KeepRequest
from server_app.checkpoints.folder import CheckpointFolder
from server_app.questions import check_size, keep
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.kept import check_kept, most_kept
from server_app.units import Kept

Lie = Callable[[Kept], None]
CLUSTER = ClusterState(0, (DeviceProfile("x", AffineLaw(0, 0, 0, 0)),), num_samples=8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, GlobalModel, Kept]:
    """A run's settings, its model, and a unit's state after a round with 4 of its rows."""
    folder = tmp_path_factory.mktemp("trained")
    options = "compression=int4", "compression.feedback=true", "model.dropout=0"
    world = World(folder, *options, "federation.rounds=1")
    training = CheckpointFolder(world.run(folder / "run")).read("000001").training
    model = GlobalModel(world.settings)
    model.weights = training.weights
    return world.settings, model, training.units[0]


def more(group: str, name: str, *shape: int) -> Lie:
    """Return a function that adds a tensor to a state."""
    return lambda kept: kept.setdefault(group, {}).update({name: torch.zeros(shape)})


def other(group: str, name: str, change: Callable[[Tensor], Tensor]) -> Lie:
    """Return a function that changes the first tensor whose name ends with ``name``."""

    def lie(kept: Kept) -> None:
        found = next(each for each in kept[group] if each.endswith(name))
        kept[group][found] = change(kept[group][found])

    return lie


def arrived(rows: int, tokens: int) -> Lie:
    """Return a function that replaces the arrived rows with ``rows`` rows of ``tokens`` tokens."""
    memory = ActivationMemory(1, {row: torch.zeros(tokens, 16) for row in range(rows)})
    return lambda kept: kept.update(last_activations=memory.pack())


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (more("optimizer", "x", 2**20), "for: x"),
        (more("optimizer", "blocks.9.x/exp_avg", 1), "for: blocks.9.x/exp_avg"),
        (more("optimizer", "head.output.weight/step"), "for: head.output.weight"),
        (other("optimizer", "/step", lambda one: one.expand(9)), "expected torch.float32 []"),
        (other("optimizer", "/exp_avg", Tensor.double), "as torch.float64"),
        (other("optimizer", "/exp_avg", lambda one: one / 0), "/exp_avg with impossible values"),
        (
            other("optimizer", "/exp_avg_sq", lambda one: one - 1),
            "/exp_avg_sq with impossible values",
        ),
        (more("residual", "x", 2**20), "for: x"),
        (other("residual", "", lambda one: one.expand(2, *one.shape)), "[2, "),
        (other("residual", "", lambda one: one / 0), "that are NaN or infinite"),
        (more("stem", "kept", 8), "for: kept"),
        (arrived(5, 1), "at most 4 rows of 40 tokens"),
        (arrived(1, 41), "at most 4 rows of 40 tokens"),
    ],
)
def test_an_impossible_state_is_refused(
    trained: tuple[Settings, GlobalModel, Kept], lie: Lie, message: str
) -> None:
    settings, model, kept = trained
    check_kept(kept, CLUSTER, 1, model, settings)
    lied = {key: {**group} for key, group in kept.items()}
    lie(lied)
    with pytest.raises(WireError) as refused:
        check_kept(lied, CLUSTER, 1, model, settings)
    assert message in str(refused.value)


def test_a_state_may_lack_weights_without_a_step(
    trained: tuple[Settings, GlobalModel, Kept],
) -> None:
    settings, model, kept = trained
    first = next(iter(kept["optimizer"])).rpartition("/")[0]
    fewer = {name: each for name, each in kept["optimizer"].items() if first not in name}
    assert len(fewer) < len(kept["optimizer"])
    check_kept({**kept, "optimizer": fewer}, CLUSTER, 1, model, settings)
    check_kept({}, CLUSTER, 1, model, settings)


def test_an_impossible_state_is_replaced_with_the_previous_checkpoints_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other units' states are stored. Long names alone could make a file that cannot be read."""
    longest = {f"{index:05}" + "x" * 430: torch.zeros(1) for index in range(2000)}
    junk = dict.fromkeys((f"junk{index}" for index in range(105)), records.pack_tensors(longest))
    lies = [junk, {"optimizer": records.pack_tensors({"x": torch.zeros(2**20)})}]

    def lying(message: Message, context: Context) -> Message:
        reply, unit = units(message, context), int(context.node_config["partition-id"])
        is_keep = message.metadata.message_type == records.KEEP and unit < len(lies)
        if is_keep and records.unpack(KeepRequest, message.content).arrived == 2:
            reply.content.update(lies[unit])
        return reply

    options = "federation.num_units=3", "strategy=all", "federation.rounds=2"
    world = World(tmp_path, *options, "task.train_rows=12")
    run_dir = world.run(tmp_path / "run", client=lying)  # type: ignore[arg-type]
    logged = [each for each in caplog.messages if "of the previous checkpoint" in each]
    assert [each[: len("unit 0")] for each in logged] == ["unit 0", "unit 1"]
    assert all("WireError" in each and each.isprintable() and len(each) < 600 for each in logged)
    folder = CheckpointFolder(run_dir)
    first, last = (folder.read(name).training.units for name in folder.names())
    for unit in range(3):
        assert first[unit]
        assert bool(differing(flat(last[unit]), flat(first[unit]))) == (unit == 2)


@pytest.mark.parametrize("rows", [8, 10**9])
def test_the_size_limit_of_a_state_depends_on_steps_not_on_reported_rows(
    trained: tuple[Settings, GlobalModel, Kept], rows: int
) -> None:
    settings, model, kept = trained
    claimed = replace(CLUSTER, num_samples=rows)
    most = most_kept(claimed, 1, model, settings)
    assert sum(most.values()) < 2**22
    content = records.pack_groups(kept)
    content.pop("message")
    check_size(content, keep(most, lambda kept: None).size)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3, 7], ""),
        ([3, 0], "not ascend within 0 … 7"),
        ([3, 3], "not ascend within"),
        ([-1, 3], "not ascend within"),
        ([3, 8], "not ascend within"),
        ([*range(7), 7, 7], "expected torch.int64 [8]"),
        ([[0, 3]], "expected torch.int64 [2]"),
        ([0.5], "expected torch.int64"),
    ],
)
def test_the_cached_rows_of_a_stem_must_be_rows_that_steps_can_have_read(
    trained: tuple[Settings, GlobalModel, Kept], rows: list[int], message: str
) -> None:
    settings, model, _ = trained
    cached = replace(
        settings, adapter=section(LoraSettings, "adapter/lora.yaml", last_blocks=1, cache=True)
    )
    kept = {"stem": {"kept": torch.tensor(rows)}}
    with pytest.raises(WireError, match=re.escape(message)) if message else nullcontext():
        check_kept(kept, CLUSTER, 9, model, cached)
