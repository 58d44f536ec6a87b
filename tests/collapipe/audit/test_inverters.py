"""Inverters guess tokens from activations: nearly all from embeddings, by chance from noise."""

import pytest
import torch
from torch import Tensor

from collapipe.audit.inverters import (
    Inverter,
    Public,
    best,
    learned,
    linear,
    most_frequent,
    nearest,
    softmax,
    table_of,
)
from collapipe.audit.material import Encoder, travelled
from collapipe.models.split import SplitModel
from collapipe.models.transformer import TransformerSpec
from collapipe.text.vocabulary import Vocabulary

SIZE, DIM, LENGTH = 60, 32, 8
VOCABULARY = Vocabulary(SIZE, 0, 1, 2)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    spec = TransformerSpec(2, 1, DIM, 2, DIM)
    return Encoder.of(spec, SplitModel(spec, VOCABULARY), VOCABULARY)


def drawn(rows: int, seed: int) -> Tensor:
    """Token ids [rows, LENGTH]; smaller ids are more frequent."""
    shares = 1 / torch.arange(1, SIZE + 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(shares.expand(rows, -1), LENGTH, True, generator=generator)


def attacks(encoder: Encoder, known: Public) -> dict[str, Inverter]:
    table = table_of(encoder, SIZE)
    return {
        "nearest": nearest(encoder),
        "softmax": softmax(known, SIZE, 0),
        "linear": linear(known, table),
        "learned": learned(known, table, 0),
    }


def share(inverter: Inverter, activations: Tensor, ids: Tensor) -> float:
    places = torch.arange(LENGTH).repeat(len(ids) // LENGTH)
    guesses = best(inverter, activations, places, SIZE, 1)[:, 0]
    return float((guesses == ids).double().mean())


def test_tokens_are_recovered_from_embeddings_without_blocks(encoder: Encoder) -> None:
    public, private = drawn(150, 0), drawn(30, 1)
    known = Public(encoder.embed(public).flatten(0, 1), public.flatten(), torch.arange(1200))
    activations = encoder.embed(private).flatten(0, 1)
    for name, inverter in attacks(encoder, known).items():
        assert share(inverter, activations, private.flatten()) > (
            0.999 if name == "nearest" else 0.95
        )


def test_on_noise_no_attack_beats_the_most_frequent_token(encoder: Encoder) -> None:
    public, private = drawn(150, 0).flatten(), drawn(200, 1).flatten()
    noise = torch.Generator().manual_seed(2)
    known = Public(torch.randn(1200, DIM, generator=noise), public, torch.arange(1200))
    activations = torch.randn(1600, DIM, generator=noise)
    most = share(most_frequent(known, SIZE), activations, private)
    assert most == pytest.approx(float((private == public.mode().values).double().mean()))
    for inverter in attacks(encoder, known).values():
        assert share(inverter, activations, private) < most + 0.03


def test_best_returns_the_tokens_with_the_highest_scores(encoder: Encoder) -> None:
    public = drawn(20, 0)
    known = Public(encoder.embed(public).flatten(0, 1), public.flatten(), torch.arange(160))
    inverter, places = linear(known, table_of(encoder, SIZE)), torch.zeros(160, dtype=torch.long)
    scores = inverter(known.activations, places, torch.arange(SIZE))
    expected = scores.topk(5, 1).indices
    assert best(inverter, known.activations, places, SIZE, 5).equal(expected)


def test_a_batch_has_the_token_shares_of_its_activations() -> None:
    known = Public(torch.zeros(3, 1), torch.tensor([7, 7, 5, 9, 5]), torch.tensor([0, 0, 0, 1, 2]))
    tokens, shares = known.batch(torch.tensor([2, 0]))
    assert tokens.tolist() == [5, 7]
    assert torch.allclose(shares, torch.tensor([[1, 0], [1 / 3, 2 / 3]]))


def test_softmax_predicts_only_tokens_of_the_public_text(encoder: Encoder) -> None:
    tokens = torch.arange(SIZE)
    public, places = tokens[: SIZE // 2], torch.zeros(SIZE, dtype=torch.long)
    known = Public(encoder.embed(public[:, None])[:, 0], public, torch.arange(len(public)))
    activations = encoder.embed(tokens[:, None])[:, 0]
    guesses = best(softmax(known, SIZE, 0), activations, places, SIZE, 1)[:, 0]
    assert guesses[: len(public)].equal(public)
    assert set(guesses.tolist()) <= set(public.tolist())


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_noise_has_the_requested_relative_norm(noise: float) -> None:
    rows = torch.randn(200, 64) * torch.linspace(0.1, 9, 200)[:, None]
    found = travelled(rows, "float32", noise, torch.Generator().manual_seed(0)) - rows
    sizes = found.norm(dim=1) / rows.norm(dim=1)
    assert float(sizes.mean()) == pytest.approx(noise, rel=0.03)
    assert travelled(rows, "float32", 0.0, torch.Generator()).equal(rows)
