"""Attacks from activations to tokens: a score of each vocabulary token for each activation.

Inverters are fitted only on public rows, encoded with the same weights, cut, noise and precision.
An activation is the row of one token or, for a pooling head, the first row of a text, which
represents all tokens of the text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe.audit.material import Encoder

Inverter = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Activations [n, d], their places in their texts [n] and tokens [c] → scores [n, c]."""
_CHUNK = 1024  # tokens that are scored at a time
_RIDGE, _RIDGE_OF_TEXTS = 1e-2, 1.0  # of the mean square of a feature
_STEPS, _AT_ONCE, _RATE, _SHARPNESS, _WIDTH = 150, 256, 1e-3, 60.0, 512
_TOKENS_AT_ONCE, _RATE_OF_SOFTMAX = 1024, 2e-2
_PART = 0.1  # factor of the layer's output, so that it departs slowly from the linear map


@dataclass(frozen=True, slots=True)
class Public:
    """The attacker's activations [m, d], and the p tokens that they represent.

    Token ``ids`` [p] belong to the activations ``of`` [p].
    """

    activations: Tensor
    ids: Tensor
    of: Tensor

    @property
    def pooled(self) -> bool:
        """Whether activations represent more than one token each."""
        return len(self.ids) != len(self.activations)

    def counts(self, size: int) -> Tensor:
        """Return how often each token occurs in each activation's text, [m, size]."""
        found = torch.zeros(len(self.activations), size)
        return found.index_put_((self.of, self.ids), torch.tensor(1.0), accumulate=True)

    def batch(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the c tokens that activations ``drawn`` [b] represent, and their shares [b, c]."""
        place = torch.full((len(self.activations),), -1)
        place[drawn] = torch.arange(len(drawn))
        there = place[self.of] >= 0
        tokens, column = torch.unique(self.ids[there], return_inverse=True)
        shares = torch.zeros(len(drawn), len(tokens))
        shares.index_put_((place[self.of[there]], column), torch.tensor(1.0), accumulate=True)
        return tokens, shares / shares.sum(1, keepdim=True).clamp(min=1)


def most_frequent(public: Public, size: int) -> Inverter:
    """Return the baseline: the same scores for all, by frequency in the public text."""
    counts = public.ids.bincount(minlength=size).float()
    return lambda activations, places, tokens: counts[tokens].expand(len(activations), -1)


def nearest(encoder: Encoder) -> Inverter:
    """Return an unfitted inverter that finds the nearest input embedding at the same place."""

    def scores(activations: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        embedded = encoder.embed(tokens[:, None].expand(-1, int(places.max()) + 1))
        found = activations.new_empty(len(activations), len(tokens))
        for place in torch.unique(places):
            at, each = places == place, embedded[:, place]
            found[at] = activations[at] @ each.T - each.square().sum(1) / 2
        return found

    return scores


def table_of(encoder: Encoder, size: int) -> Tensor:
    """Return the tokens' input embeddings at the first place, centred and normalised, [v, d]."""
    tokens = torch.arange(size)[:, None]
    table = torch.cat([encoder.embed(chunk)[:, 0] for chunk in torch.split(tokens, _CHUNK)])
    return functional.normalize(table - table.mean(0), dim=1)


def linear(public: Public, table: Tensor) -> Inverter:
    """Fit ridge regression from an activation to its token's direction in ``table``.

    A token's score is the product with its direction. For pooled activations, the regression
    predicts how often each token occurs in the text.
    """
    if public.pooled:
        weight, offset = _ridge(public.activations, public.counts(len(table)), _RIDGE_OF_TEXTS)
        return lambda activations, places, tokens: activations @ weight[:, tokens] + offset[tokens]
    weight, offset = _ridge(public.activations, table[public.ids], _RIDGE)
    return lambda activations, places, tokens: (activations @ weight + offset) @ table[tokens].T


def softmax(public: Public, size: int, seed: int) -> Inverter:
    """Fit a linear classifier over the tokens of the public text; it guesses no others."""
    known, column = torch.unique(public.ids, return_inverse=True)
    numbered, rows = replace(public, ids=column), len(public.activations)
    at_once = max(1, _TOKENS_AT_ONCE * rows // len(column))
    prior, correction = _priors(column.bincount(), at_once * len(column) / rows)
    mean, deviation = public.activations.mean(0), public.activations.std()
    weight = torch.zeros(len(known), len(mean), requires_grad=True)

    def score(activations: Tensor, tokens: Tensor) -> Tensor:
        return (activations - mean) / deviation @ weight[tokens].T

    _fit([weight], score, numbered, prior + correction, at_once, _RATE_OF_SOFTMAX, seed)
    every = torch.zeros(size, len(mean)).index_copy_(0, known, weight / deviation)
    offset = torch.full((size,), -torch.inf).index_copy_(0, known, prior)
    return lambda activations, places, tokens: (
        (activations - mean) @ every[tokens].T + offset[tokens]
    )


def learned(public: Public, table: Tensor, seed: int) -> Inverter:
    """Train a ReLU layer in parallel with the ``linear`` map, with token frequencies as a prior.

    The training objective is to distinguish the tokens of a batch.
    """
    if not public.pooled:
        weight, offset = _ridge(public.activations, table[public.ids], _RIDGE)
    counts = public.ids.bincount(minlength=len(table)) + 1.0
    at_once = _AT_ONCE * len(public.ids) / len(public.activations)
    prior, correction = _priors(counts, at_once)
    mean, deviation = public.activations.mean(0), public.activations.std()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        first = nn.Linear(public.activations.shape[1], _WIDTH)
        last = nn.Linear(_WIDTH, table.shape[1])
    for parameter in last.parameters():
        nn.init.zeros_(parameter)  # so that it begins as the linear map
    net = nn.Sequential(first, nn.ReLU(), last)

    def score(activations: Tensor, tokens: Tensor) -> Tensor:
        moved: Tensor = _PART * net((activations - mean) / deviation)
        out = moved if public.pooled else moved + activations @ weight + offset
        return out @ (_SHARPNESS * table[tokens]).T

    _fit([*net.parameters()], score, public, prior + correction, _AT_ONCE, _RATE, seed)
    return lambda activations, places, tokens: score(activations, tokens) + prior[tokens]


def best(inverter: Inverter, activations: Tensor, places: Tensor, size: int, count: int) -> Tensor:
    """Return the ``count`` tokens with the largest scores, best first, [n, count]."""
    scores = activations.new_empty(len(activations), 0)
    found = torch.empty(scores.shape, dtype=torch.long)
    for tokens in torch.split(torch.arange(size), _CHUNK):
        scores = torch.cat([scores, inverter(activations, places, tokens)], 1)
        found = torch.cat([found, tokens.expand(len(activations), -1)], 1)
        scores, kept = scores.topk(min(count, scores.shape[1]), 1)
        found = found.gather(1, kept)
    return found


def _priors(counts: Tensor, at_once: float) -> tuple[Tensor, Tensor]:
    """Return tokens' log frequencies and the correction of their scores in a batch of ``at_once``.

    Frequent tokens are in nearly every batch, rare ones in few (sampled softmax, Jean et al. 2015).
    """
    prior = (counts / counts.sum()).log()
    return prior, -(-torch.expm1(-at_once * prior.exp())).log()


def _fit(
    weights: list[Tensor],
    score: Callable[[Tensor, Tensor], Tensor],
    public: Public,
    offset: Tensor,
    at_once: int,
    rate: float,
    seed: int,
) -> None:
    """Fit weights to find the tokens of public activations, ``at_once`` in each step, drawn by
    ``seed``. ``score`` maps activations [b, d] and tokens [c] to scores [b, c], to which the
    tokens' ``offset`` [v] is added."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(weights, rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    for _ in range(_STEPS):
        drawn = torch.randperm(len(public.activations), generator=generator)[:at_once]
        tokens, shares = public.batch(drawn)
        optimiser.zero_grad()
        scores = score(public.activations[drawn], tokens) + offset[tokens]
        functional.cross_entropy(scores, shares).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    for weight in weights:
        weight.requires_grad_(False)


def _ridge(inputs: Tensor, outputs: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Return weight and offset of the ridge regression; the penalty makes it always solvable."""
    mean, target = inputs.mean(0), outputs.mean(0)
    centred = inputs - mean
    products = (centred.T @ centred).double()
    products.diagonal().add_(max(strength * float(products.diagonal().mean()), 1e-12))
    weight = torch.linalg.solve(products, (centred.T @ (outputs - target)).double()).float()
    return weight, target - mean @ weight
