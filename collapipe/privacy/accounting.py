"""Privacy accounting: ε of (ε, δ)-differential privacy of a unit, for the rounds it took part in.

Two runs are neighbours if they differ in one unit's updates: in one run the sums have them, in the
other zeros replace them. The adversary sees the model after every round. Unit n is charged for the
k_n rounds whose sums include its update. The largest k_n gives ε of the run:

1. Participation does not depend on rows. Plans depend on the options, the seed, the units' reports
   about devices, channels and numbers of rows, and on which units replied. All of these are equal
   in both runs. With noise, plans get no losses, gradient norms and rounding errors
   (``Scheduler.end``). So both runs have the same units in each round.

2. Given the earlier models, a round without unit n is equal in both runs: it sums updates of other
   units, which depend on their rows, those models and fresh noise. It does not increase n's ε.

3. Given the earlier models, a round with unit n changes the sum by at most C, for any update. With
   noise of standard deviation z·C this is the Gaussian mechanism. Values derived from its result,
   such as the next clip norm, do not increase ε.

4. So for unit n the run is the adaptive composition of k_n Gaussian mechanisms with z. This equals
   one mechanism with z/√k_n, exactly (Dong, Roth and Su 2022). Mechanisms with different z_i, of
   several runs, equal one with 1/√(Σ 1/z_i²). This holds even if each z_i is chosen after earlier
   results, provided that the sum is bounded in advance (privacy filters: Feldman and Zrnic 2021;
   Smith and Thakurta 2022).

Whole-number noise of units is not Gaussian. Its Rényi divergences are at most the Gaussian's, and
they add up over a unit's rounds in the same way, which makes ε somewhat larger. In this case the
zeros that replace updates have the unit's noise, and the adversary may be the server or another
unit.
"""

from bisect import bisect_right
from math import inf, sqrt

from collapipe.sections import PrivacySettings

_MOST_ROUNDS = 10**9


def epsilon(settings: PrivacySettings, rounds: int) -> float:
    """Return ε at ``settings.delta`` of a unit that took part in ``rounds``; ∞ without noise."""
    if not rounds:
        return 0.0
    if not settings.noise_multiplier:
        return inf
    together = rounds / settings.noise_multiplier**2
    return composed_epsilon(together, settings.delta, settings.noise_by == "units")


def affordable_rounds(settings: PrivacySettings, limit: float) -> int:
    """Return the number of rounds in which a unit can take part with ε ≤ ``limit``."""
    return bisect_right(range(1, _MOST_ROUNDS), limit, key=lambda t: epsilon(settings, t))


def composed_epsilon(squared: float, delta: float, by_units: bool) -> float:
    """Return ε at ``delta`` of rounds with noise multipliers z_i; ``squared`` is Σ 1/z_i² > 0.

    ``by_units`` must be true if units added the noise in any of these rounds.
    """
    import dp_accounting  # takes a second, and needs scipy's statistics
    from dp_accounting.rdp import RdpAccountant

    together = 1 / sqrt(squared)
    if by_units:
        account = RdpAccountant().compose(dp_accounting.GaussianDpEvent(together))
        return float(account.get_epsilon(delta))
    return float(dp_accounting.get_epsilon_gaussian(together, delta))
