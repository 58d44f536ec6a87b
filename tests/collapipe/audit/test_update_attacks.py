"""Attacks on model updates: exact without noise, useless if noise hides the update."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import federated
import pytest
import torch
from huggingface import ONE_OF_EACH, VOCABULARY, spec_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collapipe.audit import update_attacks
from collapipe.audit.attack import _hidden
from collapipe.audit.material import Material
from collapipe.audit.result import UpdateRecovery
from collapipe.audit.update_attacks import update_recoveries
from collapipe.audit.updates import Attacked, _token_table, arrived, update_of
from collapipe.config import load_overrides
from collapipe.models.lora import LoraSpec
from collapipe.models.split import ModelSpec, SplitModel

LABELLED = (
    *("task=classification", "data=synthetic", "decoder.mode=control_unit"),
    *("model=huggingface", "model.family=bert"),
    "model.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 16}",
)


@pytest.fixture
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(update_attacks, "_MOST_ROUNDS", 6)
    yield


def held(folder: Path, *further: str, unit: int | None = None) -> Material:
    """A run of one round, and public rows of another seed."""
    mine = [each for each in federated.TINY if not each.startswith(("task.", "model."))]
    options = [*mine, *LABELLED, *further, f"hydra.run.dir={folder}", "federation.rounds=1"]
    settings = load_overrides(options)
    federated.train(federated.grid_of(settings), settings)
    public = folder / "public.txt"
    public.write_text("\n".join(settings.task.splits(7).train["text"][:60]) + "\n")
    return Material.of(folder, (), unit, public, 40)


def recovered(material: Material) -> list[UpdateRecovery]:
    found = update_recoveries(material, "trained", material.model)
    return [each for some in found for each in some]


@pytest.mark.parametrize(
    "optimizer",
    [
        ("optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0.01"),
        pytest.param(
            ("optimizer=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.1"),
            marks=pytest.mark.thorough,
        ),
    ],
)
@pytest.mark.usefixtures("_few_rounds")
def test_updates_reveal_the_tokens_of_a_batch_and_the_label_of_a_single_row(
    tmp_path: Path, optimizer: tuple[str, ...]
) -> None:
    for each in recovered(held(tmp_path, *optimizer)):
        assert each.tokens is not None and each.labels is not None
        assert each.usual_tokens is not None and each.usual_labels is not None
        assert each.usual_tokens.value < 0.9
        if (each.condition.precision, each.condition.noise_multiplier) == ("float32", 0):
            assert each.tokens.value == 1
        if each.condition.rows == 1:
            assert each.rounds == 6
            assert each.labels.value == 1 > each.usual_labels.value


CLIPPED = ("privacy.clip_norm=0.1", "federation.weighting=uniform")
PRIVATE = (*CLIPPED, "federation.max_update_norm=null", "privacy.noise_multiplier=1000")
MASKED = (*PRIVATE, "privacy.secure_aggregation=true", "federation.checkpoint_every=0")


@pytest.mark.parametrize(
    ("more", "phrases"),
    [
        ((), ("", "")),
        (PRIVATE, ("updates before", "")),
        (MASKED, ("sums before", "sums alone")),
        ((*MASKED, "privacy.noise_multiplier=0"), ("", "sums alone")),
        ((*MASKED, "privacy.noise_by=units"), ("sums with", "sums alone")),
    ],
)
def test_the_text_states_if_the_server_sees_updates_or_sums_and_with_noise(
    more: tuple[str, ...], phrases: tuple[str, str]
) -> None:
    found = _hidden(load_overrides([*LABELLED, *more]))
    assert all(each in found for each in phrases) and bool(found) == any(phrases)
    assert ("noise" in found) == bool(phrases[0])


@pytest.mark.thorough
@pytest.mark.usefixtures("_few_rounds")
def test_a_private_runs_noise_is_tested_on_updates_of_its_clip_norm(tmp_path: Path) -> None:
    """The model was trained without noise, so its updates without noise reveal every token."""
    plain = held(tmp_path, "optimizer=sgd", "optimizer.lr=10", "federation.local_steps=1")
    privacy = load_overrides([*LABELLED, *PRIVATE]).privacy
    material = replace(plain, settings=replace(plain.settings, privacy=privacy))
    for each in recovered(material):
        assert each.tokens is not None
        if each.condition.precision == "float32" and each.condition.noise_multiplier in (0, 1000):
            assert (each.tokens.value == 1) == (each.condition.noise_multiplier == 0)
    drowned = [each for each in recovered(material) if each.condition.noise_multiplier == 1000]
    assert {each.condition.rows for each in drowned} == {1, 4, 16, material.settings.batch_size}

    name = Attacked.of(material.settings, plain.model, 4).embedding
    assert name is not None
    batches = [material.examples.batch(range(4))]
    (clipped, bound), (whole, norm) = (
        update_of(plain.model, each.settings, [name], batches) for each in (material, plain)
    )
    assert bound == 0.1 < norm
    assert whole[name].count_nonzero()
    assert torch.allclose(clipped[name], whole[name] * 0.1 / norm)
    noisy = arrived(clipped[name], "float32", 3.0 * bound, torch.Generator().manual_seed(0))
    assert float((noisy - clipped[name]).std()) == pytest.approx(0.3, rel=0.05)


@pytest.mark.thorough
@pytest.mark.usefixtures("_few_rounds")
def test_more_noise_reveals_fewer_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_attacks, "_NOISE_MULTIPLIERS", (1e-3, 1e-1, 1e3))
    found = recovered(held(tmp_path))
    noisy = [each.tokens for each in found if each.condition.noise_multiplier]
    little, much, drowned = (each.value for each in noisy if each is not None)
    assert 1 >= little > much > drowned
    chance = next(each.usual_tokens for each in found)
    assert chance is not None and drowned < 0.9


def test_adapters_have_no_embedding_update(tmp_path: Path) -> None:
    material = held(tmp_path, "adapter=lora")
    assert Attacked.of(material.settings, material.model, 4).embedding is None


@pytest.mark.usefixtures("_few_rounds")
def test_units_whose_models_are_not_averaged_reveal_their_tokens(tmp_path: Path) -> None:
    """The server stores each unit's weights after each round, without a mask."""
    found = recovered(held(tmp_path, "framework=pipeline", unit=1))
    assert found
    for each in found:
        assert each.tokens is not None and each.labels is not None
        if (each.condition.precision, each.condition.noise_multiplier) == ("float32", 0):
            assert each.tokens.value == 1


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_the_attacked_embedding_is_that_of_the_tokens(name: str, head: str, tmp_path: Path) -> None:
    """Tables of positions may have more rows than that of the tokens."""
    spec = spec_of(tmp_path, name, head)
    table = _token_table(SplitModel(cast(ModelSpec, spec), VOCABULARY))
    assert table is not None
    tokens = ("word_embeddings", "wte", "embed_tokens", "shared", "tok_embeddings")
    assert spec.names.to_original(table).split(".")[-2] in tokens


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_narrow_table_of_tokens_does_not_train(tmp_path: Path, quantization: str | None) -> None:
    base = cast(ModelSpec, spec_of(tmp_path, "llama", "causal"))
    spec = LoraSpec(base, rank=2, kept="bfloat16", quantization=quantization)
    assert _token_table(SplitModel(spec, VOCABULARY)) is None


def test_a_larger_table_of_positions_that_comes_first_is_not_attacked() -> None:
    class Positions(nn.Embedding):
        def forward(self, shape: torch.Size) -> Tensor:
            return super().forward(torch.arange(shape[1]))

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.tokens = Positions(99, 4), nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.tokens(ids) + self.positions(ids.shape)
            return found

    model: Any = nn.ModuleDict({"embedding": Tables()})
    model.embedding = model["embedding"]
    assert _token_table(model) == "embedding.tokens.weight"
    model.embedding.tokens.weight.requires_grad = False
    assert _token_table(model) is None


@pytest.mark.usefixtures("_few_rounds")
def test_labels_without_the_update_are_guessed_by_the_units_training_rows(tmp_path: Path) -> None:
    """The attacked rows are others: their own labels would be the answer."""
    material = held(tmp_path)
    rows = (task := material.settings.task).splits(material.settings.seed).train
    counts, names = task.label_counts(rows), material.tokenizer.labels
    name = Attacked.of(material.settings, material.model, len(names)).bias
    assert name is not None
    usual = update_attacks._Labels.fitted(material, material.model, name, 4, 1).usual
    assert torch.allclose(usual, torch.tensor([counts[each] / len(rows) for each in names]))
    assert usual.sum() == pytest.approx(1)


@pytest.mark.usefixtures("_few_rounds")
def test_sizes_that_too_few_rows_make_equal_are_attacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_attacks, "_ROWS", (50, 60, 70))
    material = held(tmp_path)
    conditions = [each.condition for each in recovered(material)]
    assert {each.rows for each in conditions} == {40, material.settings.batch_size}
    assert len({*conditions}) == len(conditions)


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=20),
    st.integers(min_value=0, max_value=300),
)
def test_guessed_counts_add_up_to_the_number_of_rows(shares: list[float], rows: int) -> None:
    counts = update_attacks._apportioned(torch.tensor(shares), rows)
    assert counts.sum() == rows
    assert (counts >= 0).all() and torch.equal(counts, counts.round())
