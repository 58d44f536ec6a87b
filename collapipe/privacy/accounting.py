"""ε of (ε, δ)-differential privacy, of a unit: what all rounds so far are worth (dp-accounting).

Two runs are neighbours where in one a unit's updates enter the sums, and in the other nothing in
their place. The adversary sees the model after every round. A round's sum of updates, each of norm
C at most, with noise of standard deviation z·C, is the Gaussian mechanism; T of them are one with
z/√T, exactly (Dong, Roth and Su 2022). So who takes part may depend on anything that was seen
before, as DSSRA's choice does.
"""

import copy
import functools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

from collapipe.sections import PrivacySettings


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
    """
    if not rounds:
        return 0.0
    if not settings.noise_multiplier:
        return inf
    import dp_accounting  # which takes a second, and needs scipy's statistics

    together = settings.noise_multiplier / sqrt(len(rounds))
    certain = float(dp_accounting.get_epsilon_gaussian(together, settings.delta))
    if not by_chance:
        return certain
    counted = tuple(Counter(rounds).items())  # in the order in which draws came first
    for known in range(len(counted)):  # none needs more than the one before, which is cached
        account = _composed(settings.noise_multiplier, counted[: known + 1])
    return min(certain, float(account.get_epsilon(settings.delta)))


def affordable_rounds(settings: PrivacySettings, limit: float) -> int:
    """How many rounds stay within ε ≤ ``limit``, whoever takes part."""
    import dp_accounting

    # the least noise of a single sum that does, and z/√T = σ
    least = dp_accounting.get_sigma_gaussian(limit, settings.delta)
    return int((settings.noise_multiplier / least) ** 2)


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
