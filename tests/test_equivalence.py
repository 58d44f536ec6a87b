"""Federations equal unsplit models, large batches, and units that train one at a time."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from federated import UNEVEN, grid_of, run, settings_of, train, weights
from flwr.app import Message
from run_files import rounds_of
from torch import Tensor

from collapipe.data.shards import batch_rows
from collapipe.flower.inline_grid import InlineGrid
from collapipe.models.dropout import DropoutKey
from collapipe.models.split import SplitModel
from collapipe.runs.model import initial_model, load_model
from collapipe.runs.rows import load_shards
from collapipe.seeds import derive
from collapipe.wire.records import num_bytes

EXACT = ("pipeline.dtype=float64", "model.dropout=0")
TWO = "federation.num_units=2"


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("pipeline=gpipe",), marks=pytest.mark.thorough),
        ("pipeline=one_f_one_b", "pipeline.num_micro_batches=5", "model.norm=post"),
        pytest.param(
            ("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=0.1"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("optimizer.state=reset", "server_optimizer=fedadam", "federation.weighting=uniform"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("server_optimizer=fedavgm", "cluster.num_devices=4", "model.tie_embeddings=false"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_pipelined_clusters_equal_unsplit_federated_averaging(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    options = (*EXACT, UNEVEN, TWO, *overrides)
    pipelined = run(tmp_path / "collapipe", *options)
    unsplit = run(tmp_path / "vanilla", "framework=vanilla_fl", *options)
    assert_close(pipelined, unsplit, 1e-8)


@pytest.mark.parametrize("state", ["keep", pytest.param("reset", marks=pytest.mark.thorough)])
def test_heads_on_control_units_equal_heads_on_the_server(tmp_path: Path, state: str) -> None:
    """Bit for bit, with dropout: in both places, the head is the last stage."""
    how = f"optimizer.state={state}", "optimizer.clip_norm=0.1"
    options = (UNEVEN, TWO, "model.dropout=0.3", *how)
    away = run(tmp_path / "server", *options)
    at_home = run(tmp_path / "unit", "decoder.mode=control_unit", *options)
    assert_equal(away, at_home)


def test_with_one_micro_batch_dropout_equals_the_unsplit_models(tmp_path: Path) -> None:
    options = ("pipeline.dtype=float64", "pipeline.num_micro_batches=1", "model.dropout=0.3", TWO)
    pipelined = run(tmp_path / "collapipe", *options)
    unsplit = run(tmp_path / "vanilla", "framework=vanilla_fl", *options)
    assert_close(pipelined, unsplit, 1e-8)


def test_one_local_step_of_sgd_is_a_step_on_the_union_of_uneven_batches(tmp_path: Path) -> None:
    """Eqs. (6)–(9): shards of 6, 13 and 20 rows give batches of 6, 13 and 16."""
    options = (
        *EXACT,
        UNEVEN,
        "batch_size=16",
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "federation.rounds=1",
        "federation.local_steps=1",
    )
    federated = run(tmp_path / "run", *options)

    settings, _, tokenizer = load_model(tmp_path / "run")
    model = initial_model(settings, tokenizer)
    total, sizes = 0, []
    for unit in range(3):
        examples = settings.task.encode(load_shards(settings)[unit], tokenizer)
        seed = derive(settings.seed, "data", unit)
        batch = examples.batch(batch_rows(examples.lengths, 16, 0, seed).tolist())
        model.loss(batch, DropoutKey(0, unit, 0)).backward()
        total += batch.num_targets
        sizes.append(batch.num_samples)
    assert len(set(sizes)) == 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad / total
    assert_close(federated, dict(model.state_dict()), 1e-12)


class OneAfterTheOther(InlineGrid):
    """Waits for each unit before the next one starts."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies: list[Message] = []
        for message in messages:
            replies += super().send_and_receive([message], timeout=timeout)
        return replies


def test_concurrent_units_with_dropout_equal_sequential_units(tmp_path: Path) -> None:
    options = ("model.dropout=0.3", TWO)
    together = run(tmp_path / "together", *options)
    settings = settings_of(tmp_path / "apart", options)
    grid = grid_of(settings)
    grid.__class__ = OneAfterTheOther
    train(grid, settings)
    assert_equal(together, weights(tmp_path / "apart"))


@pytest.mark.thorough
def test_the_cut_and_the_schedule_change_no_bit(tmp_path: Path) -> None:
    options = ("model.dropout=0.3", "pipeline.num_micro_batches=4")
    even = run(tmp_path / "even", *options, "cluster.num_devices=2")
    other = run(tmp_path / "other", *options, "cluster.num_devices=3", "pipeline=gpipe")
    assert_equal(even, other)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without options."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder)
    return folder


@pytest.mark.thorough
def test_another_seed_gives_another_model(tmp_path: Path, plain: Path) -> None:
    one, other = weights(plain), run(tmp_path, "seed=1")
    assert not torch.equal(
        one["blocks.0.attention.key.weight"], other["blocks.0.attention.key.weight"]
    )


def test_a_shared_decoder_of_one_unit_equals_a_copy(tmp_path: Path) -> None:
    """As in SplitFed v2. With one unit there is no order, so that both modes are equal. With
    several units, the weights stay finite."""
    alone = ("federation.num_units=1", "model.dropout=0")
    shared = run(tmp_path / "shared", *alone, "decoder.mode=shared")
    assert_equal(shared, run(tmp_path / "copies", *alone))
    several = run(tmp_path / "several", TWO, "decoder.mode=shared", "federation.rounds=1")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in several.values())


def test_counted_bytes_are_activations_of_all_steps_and_the_upload(tmp_path: Path) -> None:
    options = ("federation.num_units=1", "federation.rounds=1", "pipeline.num_micro_batches=1")
    model = run(tmp_path / "run", *options)
    (line,) = rounds_of(tmp_path / "run")
    settings, _, tokenizer = load_model(tmp_path / "run")
    examples = settings.task.encode(load_shards(settings)[0], tokenizer)
    seed = derive(settings.seed, "data", 0)
    up = down = 0
    for step in range(2):
        batch = examples.batch(batch_rows(examples.lengths, 6, step, seed).tolist())
        activation = 4 * int(batch.mask.sum()) * 16  # padding is not sent
        up += activation + batch.mask.numel() + 8 * batch.targets.numel()
        down += activation
    encoder = num_bytes({name: t for name, t in model.items() if not name.startswith("head.")})
    framing = 1000  # headers, norms and BEGIN frames of two steps
    assert 0 < line["bytes_up"] - encoder - up < framing
    assert 0 < line["bytes_down"] - encoder - down < framing


def test_the_whole_model_is_trained(plain: Path) -> None:
    trained = weights(plain)
    settings, _, tokenizer = load_model(plain)
    fresh: SplitModel = initial_model(settings, tokenizer)
    same = [n for n, tensor in fresh.state_dict().items() if torch.equal(tensor, trained[n])]
    assert same == []
