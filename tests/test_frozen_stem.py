"""A run with a frozen stem has the same weights, bit for bit, with or without cached
activations."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from federated import TINY, UNEVEN, grid_of, run, train
from full_disk import full_disk
from huggingface import folder, without_dropout
from pretrained import causal_folder, lora_run
from pytest import LogCaptureFixture, MonkeyPatch
from run_files import rounds_of
from torch import Tensor

from collapipe import config
from collapipe.cli.trained.export import export_run
from collapipe.errors import ConfigError
from collapipe.models.cost import rows_of_input
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.models.stem import ActivationStore
from collapipe.runs.model import load_model

STEM = ("adapter=lora", "adapter.last_blocks=2", "model.dropout=0.2", "adapter.dropout=0.1")
ALONE = ("federation.num_units=1", "task.train_rows=12", "federation.rounds=3")  # 2 steps an epoch
CACHED = "adapter.cache=true"


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the weights of one unit's run without a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return run(tmp_path_factory.mktemp("run"), *STEM, *ALONE)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> set[str]:
    """Return the names of tensors that differ in any bit."""
    assert found.keys() == expected.keys()
    same = {n for n in found if found[n].numpy().tobytes() == expected[n].numpy().tobytes()}
    return found.keys() - same


def files() -> list[Path]:
    """Return the files of activations in the user's cache."""
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("collapipe/activations/*/*"))


def stem_seconds(run_dir: Path) -> list[float]:
    """Return the modelled stem times of a run of one unit."""
    return [line["cost"]["clusters"][0]["stem_s"] for line in rounds_of(run_dir)]


def test_cached_activations_change_no_bit(tmp_path: Path, uncached: dict[str, Tensor]) -> None:
    """Bits are equal in the run that fills the cache and in a second one; both have the same
    clock."""
    outcomes = []
    for name in ("cold", "warm"):
        assert differing(run(tmp_path / name, *STEM, *ALONE, CACHED), uncached) == set()
        lines = rounds_of(tmp_path / name)
        outcomes.append([(line["clock_s"], line["train_loss"]) for line in lines])
        assert 0 < len(files()) <= 12
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["federation.num_units=2"], marks=pytest.mark.thorough),
        pytest.param(
            ["framework=vanilla_fl", "federation.num_units=2"], marks=pytest.mark.thorough
        ),
        ["decoder.mode=control_unit", "pipeline.dtype=float64"],
        pytest.param(["compression=int8"], marks=pytest.mark.thorough),
    ],
    ids=lambda options: options[0],
)
def test_a_cache_changes_no_bit_with_other_options(tmp_path: Path, options: list[str]) -> None:
    kept, computed = (
        run(tmp_path / name, *STEM, *ALONE, *options, f"adapter.cache={name}")
        for name in ("true", "false")
    )
    assert files()
    assert differing(kept, computed) == set()


def test_with_a_cache_the_clock_counts_each_row_once(tmp_path: Path) -> None:
    """Without a cache, it counts each row in every epoch. A local step with all rows is an
    epoch."""
    options = [*STEM, *ALONE, "batch_size=12", "federation.local_steps=1"]
    run(tmp_path / "true", *options, CACHED)
    run(tmp_path / "false", *options)
    each_s = stem_seconds(tmp_path / "false")[0]
    assert each_s > 0
    assert stem_seconds(tmp_path / "true") == [each_s, 0.0, 0.0]
    assert stem_seconds(tmp_path / "false") == [each_s] * 3
    for name in ("true", "false"):
        for line in rounds_of(tmp_path / name):
            (cost,) = line["cost"]["clusters"]
            assert line["cost"]["delay_s"] == cost["stem_s"] + cost["finish_s"]


@pytest.mark.parametrize(
    "damage",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in (b"", b"torn")), None],
    ids=["empty", "torn", "one bit"],
)
def test_a_damaged_cache_file_is_computed_again(
    tmp_path: Path, uncached: dict[str, Tensor], caplog: LogCaptureFixture, damage: bytes | None
) -> None:
    run(tmp_path / "first", *STEM, *ALONE, CACHED)
    whole = {file: file.read_bytes() for file in files()}
    for file, data in whole.items():
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        file.write_bytes(flipped if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert differing(run(tmp_path / "again", *STEM, *ALONE, CACHED), uncached) == set()
    assert str(files()[0]) in caplog.text
    assert {file: file.read_bytes() for file in files()} == whole


def test_the_store_discards_an_activation_of_another_row(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path / "store", 10_000)
    rows, activation = torch.tensor([[1, 2], [1, 3]]), torch.rand(2, 4)
    store.keep(rows[0], activation)
    (file,) = (tmp_path / "store").iterdir()
    store.keep(rows[1], activation)
    (other,) = {*(tmp_path / "store").iterdir()} - {file}
    assert torch.equal(store.load(rows[0]), activation)  # type: ignore[arg-type]
    file.replace(other)
    assert store.load(rows[0]) is store.load(rows[1]) is None
    assert not list((tmp_path / "store").iterdir())


def test_units_with_the_same_rows_can_share_a_store(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """Each unit opens the store again in each round, which counts the existing files."""
    rows = [(torch.tensor([n]), torch.full((100_000,), float(n))) for n in range(8)]

    def unit(number: int) -> None:
        for round_ in range(20):
            store = ActivationStore(tmp_path / f"store {round_ % 5}", 10**9)
            for ids, activation in rows:
                found = store.load(ids)
                assert found is None or torch.equal(found, activation)
                store.keep(ids, activation)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor() as units:
        assert [*units.map(unit, range(4))] == [None] * 4
    assert caplog.text == ""
    assert all(len([*folder.iterdir()]) == len(rows) for folder in tmp_path.iterdir())


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def interrupted(file: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ActivationStore(tmp_path / "store", 10_000).keep(torch.tensor([1]), torch.rand(2))
    assert [*(tmp_path / "store").iterdir()] == []


def test_an_old_partial_file_of_a_killed_writer_is_deleted(tmp_path: Path) -> None:
    ids, activation = torch.arange(4), torch.zeros(2, 4)
    left, written = tmp_path / ".left", tmp_path / ".written"
    for partial in left, written:
        partial.write_bytes(bytes(1000))
    os.utime(left, (0, 0))
    ActivationStore(tmp_path, limit_bytes=1900).keep(ids, activation)
    assert not left.exists() and written.exists()
    assert len([*tmp_path.glob("*.safetensors")]) == 1


def test_the_cache_stays_within_its_byte_limit(tmp_path: Path, uncached: dict[str, Tensor]) -> None:
    limit = 8000
    found = run(tmp_path, *STEM, *ALONE, CACHED, f"adapter.cache_bytes={limit}")
    assert differing(found, uncached) == set()
    assert 0 < sum(file.stat().st_size for file in files()) <= limit
    assert all(seconds > 0 for seconds in stem_seconds(tmp_path))  # some rows have no room


def test_a_full_disk_disables_the_cache_and_changes_no_bit(
    tmp_path: Path,
    uncached: dict[str, Tensor],
    monkeypatch: MonkeyPatch,
    caplog: LogCaptureFixture,
) -> None:
    keep = ActivationStore.keep

    def without_room(store: ActivationStore, ids: Tensor, activation: Tensor) -> None:
        with full_disk():
            keep(store, ids, activation)

    monkeypatch.setattr(ActivationStore, "keep", without_room)
    with caplog.at_level(logging.WARNING):
        assert differing(run(tmp_path, *STEM, *ALONE, CACHED), uncached) == set()
    assert files() == []
    assert caplog.text.count("no more activations are kept") == 3  # once a round


def test_a_pipeline_after_a_stem_equals_one_device(tmp_path: Path) -> None:
    short = UNEVEN, "federation.local_steps=1"
    exact = (*STEM, "pipeline.dtype=float64", "model.dropout=0", "adapter.dropout=0", *short)
    piped = run(tmp_path / "piped", *exact, CACHED, "pipeline.num_segments=2")
    whole = run(tmp_path / "whole", *exact, "framework=vanilla_fl")
    assert differing(piped, whole)  # the order of sums differs
    for name, weight in whole.items():
        torch.testing.assert_close(piped[name], weight, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", []),
        ("llama", ["model.quantization=nf4", "pipeline.dtype=float64"]),
    ],
)
def test_a_stem_with_experts_or_quantised_weights_trains(
    tmp_path: Path, family: str, options: list[str]
) -> None:
    """Rows choose experts, and a pass without values has none; the stem appends no rows."""
    model, one = causal_folder(tmp_path / "model", family=family), "federation.rounds=1"
    options = ["adapter.last_blocks=1", "federation.num_units=1", one, *options]
    settings = lora_run(tmp_path / "run", model, *options)
    assert rows_of_input(settings.model, tokens=5) == 5
    assert rounds_of(tmp_path / "run")[0]["failures"] == {}


def test_an_exported_model_with_a_stem_encodes_like_the_trained_one(tmp_path: Path) -> None:
    """T5's bias table passes through stem, blocks and cache files."""
    name = folder(tmp_path, "t5", **without_dropout("t5"))
    options = [option for option in TINY if not option.startswith("model.")]
    options += ["model=huggingface", f"model.name={name}", "task.max_length=18", *ALONE]
    options += [
        "adapter=lora",
        "adapter.last_blocks=2",
        CACHED,
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    settings = config.load_overrides(options)
    train(grid_of(settings), settings)
    export_run(tmp_path / "run", tmp_path / "out", ())
    settings, model, tokenizer = load_model(tmp_path / "run")
    plain = HuggingFaceSpec(str(tmp_path / "out"), pretrained=True)
    exported = SplitModel(cast(ModelSpec, plain), tokenizer.vocabulary).eval()
    batch = settings.task.inputs(["Dienstag", "Montag, 14:05"], tokenizer).batch([0, 1])
    with torch.no_grad():
        found, expected = (m.encode(batch.inputs, batch.mask) for m in (exported, model))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
        begun = model.encode(batch.inputs, batch.mask)
    rounding, learned = ((each - expected)[batch.mask].abs().max() for each in (found, begun))
    assert 100 * rounding < learned
    assert len(files()) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["adapter.last_blocks=7"], r"adapter\.last_blocks=7: .* 1 … 6"),
        (["adapter.last_blocks=0"], r"adapter\.last_blocks=0: must be at least 1"),
        (["adapter.cache=true"], r"adapter\.cache=true: .* set adapter\.last_blocks"),
        (["adapter.last_blocks=1", "pipeline.num_segments=2"], r"more than adapter\.last_blocks=1"),
        (["adapter.last_blocks=2", "framework=splitfed"], r"framework\.cut=1: .* null"),
    ],
)
def test_the_error_for_invalid_stem_options_is_one_line(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.load_overrides(["adapter=lora", *options])
    assert "\n" not in str(caught.value)
