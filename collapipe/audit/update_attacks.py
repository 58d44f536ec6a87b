"""Attacks that recover words and labels of a unit's rows from its update.

Words: a token that occurs in no row gets no embedding gradient, so embeddings that moved reveal the
tokens of the unit's rows (Melis et al. 2019). Labels: the gradient of a label's bias is its mean
probability minus its share of the rows (for one row: Zhao et al. 2020, "iDLG"). The updates are
simulated, from the run's model and rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from collapipe.audit.material import Material
from collapipe.audit.recovery import frequent, share_of
from collapipe.audit.result import State, UpdateCondition, UpdateRecovery
from collapipe.audit.updates import Attacked, arrived, update_of
from collapipe.models.split import SplitModel
from collapipe.state import Precision
from collapipe.tasks.task import Examples
from collapipe.tensors import Batch, Tensors

_ROWS, _VARIED, _MOST_ROUNDS, _SHADOWS = (1, 4, 16), 4, 30, 8
_NOISE_MULTIPLIERS = 1e-4, 1e-3, 1e-2
NUM_SIZES = len(_ROWS) + 1


def update_recoveries(
    held: Material, state: State, model: SplitModel
) -> Iterator[list[UpdateRecovery]]:
    """Find the attacked weights, and return an iterator over the recoveries from simulated updates
    of ``model``, which attacks one size of round at a time.

    Rounds have ``NUM_SIZES`` sizes, from one step with few rows to the run's own round. Small
    rounds are also attacked in each precision and with noise, and each round with the run's noise.
    Empty for a size that too few rows make equal to an earlier one, and if no weight that an attack
    uses trains and is sent.
    """
    labels = held.tokenizer.vocabulary.num_labels
    return _by_size(held, state, model, Attacked.of(held.settings, model, labels))


def _by_size(
    held: Material, state: State, model: SplitModel, attacked: Attacked
) -> Iterator[list[UpdateRecovery]]:
    """Yield as ``update_recoveries`` returns."""
    settings, precision = held.settings, held.settings.compression.upload
    one = UpdateCondition(state, 1, 1, "float32" if precision == "auto" else precision)
    noise, there = settings.privacy.noise_multiplier, len(held.examples.lengths)
    sizes = *((rows, 1) for rows in _ROWS), (settings.batch_size, settings.federation.local_steps)
    done = set[UpdateCondition]()
    for rows, steps in sizes:
        size = replace(one, rows=min(rows, there), steps=steps)
        if size in done or not any(attacked):
            yield []
            continue
        done.add(size)
        conditions = [size, replace(size, noise_multiplier=noise)]
        if (rows, steps) == (_VARIED, 1):  # of which there are many rounds
            conditions += [replace(size, precision=each) for each in get_args(Precision)]
            conditions += [replace(size, noise_multiplier=each) for each in _NOISE_MULTIPLIERS]
        yield _measured(held, model, attacked, [*dict.fromkeys(conditions)])


def _measured(
    held: Material, model: SplitModel, attacked: Attacked, conditions: Sequence[UpdateCondition]
) -> list[UpdateRecovery]:
    """Yield recoveries from the same rounds under each of ``conditions``, of noise and rounding."""
    size = conditions[0].rows, conditions[0].steps
    words = _Words.of(held, model, attacked.embedding) if attacked.embedding else None
    labels = _Labels.fitted(held, model, attacked.bias, *size) if attacked.bias else None
    counts: dict[UpdateCondition, list[list[int]]] = {each: [] for each in conditions}
    for batches in _rounds(held.examples, *size):
        changes, bound = update_of(model, held.settings, [*filter(None, attacked)], batches)
        for condition, counted in counts.items():
            noise = held.generator("noise", len(counted))
            deviation = condition.noise_multiplier * bound
            received = {
                name: arrived(change, condition.precision, deviation, noise)
                for name, change in changes.items()
            }
            of_words = words.counted(batches, received) if words else [0] * 5
            of_labels = labels.counted(batches, received) if labels else [0] * 3
            counted.append(of_words + of_labels)
    return [_recovery(condition, torch.tensor(counted)) for condition, counted in counts.items()]


def _recovery(condition: UpdateCondition, counted: Tensor) -> UpdateRecovery:
    tokens, found, usual, rare, rare_found, labels, right, usual_right = counted.unbind(1)
    return UpdateRecovery(
        condition,
        rounds=len(counted),
        tokens=share_of(found, tokens),
        rare_tokens=share_of(rare_found, rare),
        usual_tokens=share_of(usual, tokens),
        labels=share_of(right, labels),
        usual_labels=share_of(usual_right, labels),
    )


def _rounds(examples: Examples, rows: int, steps: int) -> Iterator[list[Batch]]:
    """Yield the batches of rounds on disjoint rows; if rows are too few, one round repeats rows."""
    there = len(examples.lengths)
    for first in range(0, min(_MOST_ROUNDS, max(1, there // (rows * steps)))):
        starts = range(first * rows * steps, (first + 1) * rows * steps, rows)
        yield [examples.batch([(s + n) % there for n in range(rows)]) for s in starts]


@dataclass(frozen=True, slots=True)
class _Words:
    """The attack on words. ``before`` are token embeddings before a round [v, d], the weight
    ``name``. ``special`` and ``rare`` mark tokens, bool [v]. ``usual`` counts tokens in the public
    text [v]."""

    name: str
    before: Tensor
    special: Tensor
    rare: Tensor
    usual: Tensor

    @classmethod
    def of(cls, held: Material, model: SplitModel, name: str) -> "_Words":
        before, known = model.get_parameter(name).detach(), held.tokenizer.vocabulary
        special = torch.zeros(len(before), dtype=torch.bool)
        special[[known.bos, known.eos, known.pad]] = True
        ids = held.public.ids[held.public.real]
        rare = ~frequent(ids, len(before))
        return cls(name, before, special, rare, ids.bincount(minlength=len(before)).float())

    def counted(self, batches: Sequence[Batch], changes: Tensors) -> list[int]:
        """Return numbers of tokens in the rows and of correct guesses, for all and for rare tokens.

        Guesses come from the change of embeddings and, as a baseline, from frequencies. There are
        as many guesses as tokens.
        """
        true = torch.zeros_like(self.special)
        for batch in batches:
            true[batch.inputs[batch.mask]] = True
        true &= ~self.special
        found, usual = (
            self._highest(scores, int(true.sum())) & true
            for scores in (self._moved(changes[self.name]), self.usual)
        )
        return [
            int(each.sum()) for each in (true, found, usual, true & self.rare, found & self.rare)
        ]

    def _moved(self, change: Tensor) -> Tensor:
        """Return how far each embedding moved without weight decay, estimated as the shrinkage that
        most embeddings share."""
        squares = self.before.square().sum(1)
        decay = ((change * self.before).sum(1) / squares.clamp(min=1e-12)).median()
        distance: Tensor = torch.linalg.vector_norm(change - decay * self.before, dim=1)
        return distance

    def _highest(self, scores: Tensor, count: int) -> Tensor:
        chosen = torch.zeros_like(self.special)
        chosen[scores.masked_fill(self.special, -1.0).topk(count).indices] = True
        return chosen


@dataclass(frozen=True, slots=True)
class _Labels:
    """The attack on labels. Labels' shares of a round's rows, [c], are estimated as ``level`` +
    ``slope``·change of their bias, the weight ``name``. The baseline without the update is
    ``usual``, the shares of labels in all training rows."""

    name: str
    level: Tensor
    slope: float
    usual: Tensor

    @classmethod
    def fitted(
        cls, held: Material, model: SplitModel, name: str, rows: int, steps: int
    ) -> "_Labels":
        """Fit the attack to simulated rounds with public texts and random labels."""
        size = held.tokenizer.vocabulary.num_labels
        draw = held.generator("labels")
        shares, changes = list[Tensor](), list[Tensor]()
        for number, batches in enumerate(_rounds(held.public_examples, rows, steps)):
            if number == _SHADOWS:
                break
            drawn = [
                replace(each, targets=torch.randint(size, (each.num_samples, 1), generator=draw))
                for each in batches
            ]
            changes.append(update_of(model, held.settings, [name], drawn)[0][name])
            shares.append(_shares(drawn, size))
        level, moved = torch.stack(shares), torch.stack(changes)
        across = moved - moved.mean(0)
        slope = float((across * (level - level.mean(0))).sum() / across.square().sum().clamp(1e-30))
        usual = held.label_counts / held.label_counts.sum().clamp(min=1)
        return cls(name, level.mean(0) - slope * moved.mean(0), slope, usual)

    def counted(self, batches: Sequence[Batch], changes: Tensors) -> list[int]:
        """Return numbers of labels and of correct guesses, from the change and from ``usual``."""
        rows = sum(each.num_samples for each in batches)
        true = (_shares(batches, len(self.usual)) * rows).round()
        guesses = (
            _apportioned(each, rows)
            for each in (self.level + self.slope * changes[self.name], self.usual)
        )
        return [rows, *(int(torch.minimum(true, each).sum()) for each in guesses)]


def _shares(batches: Sequence[Batch], labels: int) -> Tensor:
    """Return the share of rows with each label, [labels]."""
    counts = sum(each.targets.flatten().bincount(minlength=labels) for each in batches)
    assert isinstance(counts, Tensor)
    return counts / counts.sum()


def _apportioned(shares: Tensor, rows: int) -> Tensor:
    """Round shares to whole numbers that sum to ``rows``, by the largest remainders."""
    positive = shares.clamp(min=0) + 1e-12
    quotas = positive / positive.sum() * rows
    whole = quotas.floor()
    left = rows - int(whole.sum())
    whole[(quotas - whole).topk(left).indices] += 1
    return whole
