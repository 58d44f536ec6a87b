"""ε of (ε, δ)-differential privacy, of a unit: what all rounds so far are worth (dp-accounting).

Two runs are neighbours where in one a unit's updates enter the sums, and in the other nothing in
their place. The adversary sees the model after every round. A round's sum of updates, each of norm
C at most, with noise of standard deviation z·C, is the Gaussian mechanism; T of them are one with
z/√T, exactly (Dong, Roth and Su 2022). So who takes part may depend on anything that was seen
before, as DSSRA's choice does.

Noise that units add in whole numbers is no such mechanism: its Rényi divergences are bounded by
those of the Gaussian, which makes ε somewhat larger. There a unit that is left out still adds its
noise, and the adversary may be the server or one of the others.
"""

import copy
import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

from collapipe.sections import PrivacySettings

_MOST_ROUNDS = 10**9


@dataclass(frozen=True, slots=True)
class Draw:
    """``chosen`` units of ``present`` took part in a round, each set of so many equally likely."""

    present: int
    chosen: int


def epsilon(settings: PrivacySettings, rounds: Collection[Draw], by_chance: bool) -> float:
    """ε at ``settings.delta`` after these rounds; infinite without noise.

    Where units are chosen ``by_chance``, and nobody learns who, a round tells less of each: the
    bound of Wang, Balle and Kasiviswanathan (2019) for samples without replacement, in which a
    unit's update is replaced by another one, so that the sum moves by 2·C. What is less is true.
    The server knows who, which counts where it is not to be trusted: with the units' noise.
    """
    if not rounds:
        return 0.0
    if not settings.noise_multiplier:
        return inf
    certain = _of_everybody(settings, len(rounds))
    if not by_chance or settings.noise_by == "units":
        return certain
    counted = tuple(Counter(rounds).items())  # in the order in which draws came first
    for known in range(len(counted)):  # none needs more than the one before, which is cached
        account = _composed(settings.noise_multiplier, counted[: known + 1])
    return min(certain, float(account.get_epsilon(settings.delta)))


def affordable_rounds(settings: PrivacySettings, limit: float) -> int:
    """How many rounds stay within ε ≤ ``limit``, whoever takes part."""
    return bisect_right(range(1, _MOST_ROUNDS), limit, key=lambda t: _of_everybody(settings, t))


def _of_everybody(settings: PrivacySettings, rounds: int) -> float:
    """ε of ``rounds`` that each unit takes part in."""
    import dp_accounting  # which takes a second, and needs scipy's statistics
    from dp_accounting.rdp import RdpAccountant

    together = settings.noise_multiplier / sqrt(rounds)
    if settings.noise_by == "units":
        account = RdpAccountant().compose(dp_accounting.GaussianDpEvent(together))
        return float(account.get_epsilon(settings.delta))
    return float(dp_accounting.get_epsilon_gaussian(together, settings.delta))


@functools.cache  # a draw's cost takes a second, and most of a run's are alike
def _composed(noise_multiplier: float, rounds: tuple[tuple[Draw, int], ...]) -> Any:
    """dp-accounting's account of so many rounds of each draw; not to be changed."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    if not rounds:
        return RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    *earlier, (draw, count) = rounds
    account = copy.deepcopy(_composed(noise_multiplier, tuple(earlier)))
    replaced = GaussianDpEvent(noise_multiplier / 2)
    event = SampledWithoutReplacementDpEvent(draw.present, draw.chosen, replaced)
    return account.compose(event, count)
