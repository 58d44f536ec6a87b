"""The units' mean update with each one's part clipped and noise added, and what it has cost."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from collapipe.errors import BudgetSpentError, Called, unit_called
from collapipe.formatting import counted
from collapipe.privacy.accounting import epsilon
from collapipe.privacy.clipping import add_clipped_update
from collapipe.privacy.noise import GaussianNoise
from collapipe.sections import PrivacySettings
from collapipe.tensors import Tensors

_RATE = 0.2  # η_C of the clip norm's steps
_COUNTED_AS = 20  # of n units, how many are within is counted with a deviation of n / 20


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """The sum of so many ``units``' clipped changes, as float64; of ``within`` of them the norm was
    below the clip norm, which of masked ones nobody knows."""

    changes: Tensors
    units: int
    within: int = 0


@dataclass
class PrivateMean:
    """Makes a round's mean, and keeps the account: in how many ``rounds`` each unit took part.

    With ``clip_quantile`` γ the clip norm follows C ← C·exp(−η_C·(b − γ)), in which b is the share
    of updates that were not clipped, counted with noise of its own (Andrew et al. 2021). Sum and
    count together are as private as the sum would be by itself with ``noise_multiplier``: an update
    counts as ±½ around n/2, n being known, and one that is left out moves the count by ½.
    """

    settings: PrivacySettings
    clip_norm: float
    rounds: Counter[int] = field(default_factory=Counter)

    def check(self, units: Collection[int], called: Called = unit_called) -> None:
        """Raise ``BudgetSpentError`` if a round of these ``units`` is one too many."""
        most, spent = self.settings.max_epsilon, max(self.rounds.values(), default=0)
        unit = max(units, key=lambda each: self.rounds[each])
        then = self._epsilon(max(self.rounds[unit] + 1, spent))
        if most is not None and then > most:
            raise BudgetSpentError(
                f"privacy.max_epsilon={most:g} is spent: ε = {self.epsilon:.3g} after "
                f"{counted(spent, 'round')} of one unit, {then:.3g} after one more of "
                f"{called(unit)}"
            )

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far, of the unit that took part in most; None without noise."""
        spent = max(self.rounds.values(), default=0)
        return self._epsilon(spent) if self.settings.noise_multiplier else None

    def summed(self, models: Collection[Tensors], sent: Tensors) -> ClippedSum:
        """Of the ``models`` that began at ``sent``."""
        total = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in _real(sent)}
        most = self.clip_norm
        norms = [add_clipped_update(total, model, sent, most) for model in models]
        return ClippedSum(total, len(models), sum(each < most for each in norms))

    def mean(self, summed: ClippedSum, sent: Tensors, seed: int) -> Tensors:
        """θ(t) + (Σ clipped updates + noise) / n of the n units whose models began at ``sent``.

        ``seed`` is the round's, for noise that ``privacy.noise_seed`` asks for. Whole numbers and
        truth values stay as they are.
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
            share = min(1.0, max(0.0, share))  # noise may be longer than the count
            self.clip_norm *= math.exp(-_RATE * (share - self.settings.clip_quantile))
        return {
            name: (each + total[name] / summed.units).to(each.dtype) if name in total else each
            for name, each in sent.items()
        }

    def count(self, units: Collection[int]) -> None:
        """Charge the ``units`` of a sum for its round; called before anything is released."""
        self.rounds.update(list(units))  # of a mapping the values would count

    def packed(self) -> Tensors:
        """All that lasts from round to round, for a checkpoint."""
        return {
            "clip_norm": torch.tensor(self.clip_norm, dtype=torch.float64),
            "rounds_of_units": torch.tensor(sorted(self.rounds.items()), dtype=torch.int64).reshape(
                -1, 2
            ),
        }

    def restore(self, packed: Tensors, told: Mapping[int, int]) -> None:
        """What ``packed`` made. All rounds that were ``told`` count, though the run goes back to an
        earlier one: others have seen models of each. Only noise that repeats tells nothing new."""
        self.clip_norm = float(packed["clip_norm"])
        self.rounds = Counter(dict(packed["rounds_of_units"].tolist()))
        if self.settings.noise_seed is None:
            self.rounds |= Counter(told)

    def _epsilon(self, rounds: int) -> float:
        return epsilon(self.settings, rounds)

    def _deviations(self, units: int) -> tuple[float, float]:
        """z_Δ of the sum, in clip norms, and σ_b of the count: z⁻² = z_Δ⁻² + (2·σ_b)⁻².

        0 where units have added it. Of few units σ_b is z, for n / 20 would leave the sum too
        much noise, or none would do.
        """
        noise = self.settings.noise_multiplier
        if self.settings.noise_by == "units":
            return 0.0, 0.0
        if self.settings.clip_quantile is None or not noise:
            return noise, 0.0
        count = max(units / _COUNTED_AS, noise)
        return (noise**-2 - (2 * count) ** -2) ** -0.5, count


def _real(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Those of real numbers by their names, for a checkpoint's weights have an order of theirs."""
    return [(name, t) for name, t in sorted(tensors.items()) if t.is_floating_point()]
