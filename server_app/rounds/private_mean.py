"""The mean of clipped updates with noise, and the account of the privacy budget that it spends."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from collapipe.errors import BudgetSpentError, Called, unit_called
from collapipe.formatting import counted
from collapipe.privacy import accounting
from collapipe.privacy.clipping import add_clipped_update
from collapipe.privacy.noise import GaussianNoise
from collapipe.sections import PrivacySettings
from collapipe.tensors import Tensors

_RATE = 0.2  # η_C of the clip norm's steps
_COUNTED_AS = 20  # the count of unclipped updates of n units gets noise of deviation n / 20


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """The sum of clipped changes, as float64, of a number of ``units``.

    ``within`` counts the changes whose norm was below the clip norm; it is 0 for masked updates,
    whose norms are not known.
    """

    changes: Tensors
    units: int
    within: int = 0


@dataclass
class PrivateMean:
    """Computes a round's mean, and counts in ``rounds`` how often each unit took part.

    With ``clip_quantile`` γ the clip norm follows C ← C·exp(−η_C·(b − γ)) (Andrew et al. 2021).
    Here b is the share of updates that were not clipped, with separate noise. The sum and the
    count together are as private as the sum alone with ``noise_multiplier``. Because n is known,
    each update counts as ±½ around n/2, so leaving one out moves the count by ½.
    """

    settings: PrivacySettings
    clip_norm: float
    rounds: Counter[int] = field(default_factory=Counter)

    def check(self, units: Collection[int], called: Called = unit_called) -> None:
        """Raise ``BudgetSpentError`` if a round of these ``units`` would exceed ``max_epsilon``."""
        most, spent = self.settings.max_epsilon, max(self.rounds.values(), default=0)
        unit = max(units, key=lambda each: self.rounds[each])
        then = accounting.epsilon(self.settings, max(self.rounds[unit] + 1, spent))
        if most is not None and then > most:
            raise BudgetSpentError(
                f"privacy.max_epsilon={most:g} is spent: ε = {self.epsilon:.3g} after "
                f"{counted(spent, 'round')} of one unit, {then:.3g} after one more of "
                f"{called(unit)}"
            )

    @property
    def epsilon(self) -> float | None:
        """ε so far of the unit that took part in the most rounds; None without noise."""
        spent = max(self.rounds.values(), default=0)
        return accounting.epsilon(self.settings, spent) if self.settings.noise_multiplier else None

    def summed(self, models: Collection[Tensors], sent: Tensors) -> ClippedSum:
        """Sum the clipped changes of the ``models``, whose training began at ``sent``."""
        total = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in _real(sent)}
        most = self.clip_norm
        norms = [add_clipped_update(total, model, sent, most) for model in models]
        return ClippedSum(total, len(models), sum(each < most for each in norms))

    def mean(self, summed: ClippedSum, sent: Tensors, seed: int) -> Tensors:
        """Return θ(t) + (Σ clipped updates + noise) / n for n units that began at θ(t), ``sent``.

        ``seed`` is the round's seed; it is used only if ``privacy.noise_seed`` is set. Integers and
        Booleans are not changed.
        """
        total = summed.changes
        source = GaussianNoise(None if self.settings.noise_seed is None else seed)
        deviation, count_deviation = self._deviations(summed.units)
        if deviation:
            total = {
                name: total[name] + deviation * self.clip_norm * source.draw(each.shape)
                for name, each in _real(sent)
            }
        if self.settings.clip_quantile is not None:
            share = (summed.within + count_deviation * float(source.draw(()))) / summed.units
            share = min(1.0, max(0.0, share))  # noise may exceed the count
            self.clip_norm *= math.exp(-_RATE * (share - self.settings.clip_quantile))
        return {
            name: (each + total[name] / summed.units).to(each.dtype) if name in total else each
            for name, each in sent.items()
        }

    def charge(self, units: Collection[int]) -> None:
        """Charge the ``units`` of a sum for its round. Call this before anything is released."""
        self.rounds.update(list(units))  # for a mapping ``Counter`` would add up the values

    def packed(self) -> Tensors:
        """Return the state that lasts from round to round, for a checkpoint."""
        rounds = torch.tensor(sorted(self.rounds.items()), dtype=torch.int64).reshape(-1, 2)
        clip_norm = torch.tensor(self.clip_norm, dtype=torch.float64)
        return {"clip_norm": clip_norm, "rounds_of_units": rounds}

    def restore(self, packed: Tensors, account: Mapping[int, int]) -> None:
        """Restore the state that ``packed`` returned.

        All rounds in the ``account`` count, also those after the checkpoint, because their
        models were released. With a ``noise_seed`` the repeated rounds release the same models
        again, so they do not count twice.
        """
        self.clip_norm = float(packed["clip_norm"])
        self.rounds = Counter(dict(packed["rounds_of_units"].tolist()))
        if self.settings.noise_seed is None:
            self.rounds |= Counter(account)

    def _deviations(self, units: int) -> tuple[float, float]:
        """Return z_Δ of the sum, in clip norms, and σ_b of the count: z⁻² = z_Δ⁻² + (2·σ_b)⁻².

        Both are 0 if units add the noise. σ_b is at least z: with few units n / 20 would make z_Δ
        very large, or leave the equation without a solution.
        """
        noise = self.settings.noise_multiplier
        if self.settings.noise_by == "units":
            return 0.0, 0.0
        if self.settings.clip_quantile is None or not noise:
            return noise, 0.0
        count = max(units / _COUNTED_AS, noise)
        return (noise**-2 - (2 * count) ** -2) ** -0.5, count


def _real(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point tensors by name, because a checkpoint may have another order."""
    return [(name, t) for name, t in sorted(tensors.items()) if t.is_floating_point()]
