"""ε of (ε, δ)-differential privacy, of a unit: what the rounds that it took part in are worth.

Two runs are neighbours if they differ in one unit's updates: the sums of one run have them, the
sums of the other have zeros in their place. The adversary sees the model after every round. Unit n
is charged for the k_n rounds whose sums have its update, and the largest k_n gives ε of the run:

1. Who takes part is decided without the rows. Plans are functions of the options, the seed, what
   units report of devices, channels and numbers of rows, and who answered: all of that is the same
   in both runs. With noise, plans get no losses, norms of gradients and rounding errors
   (``Scheduler.end``). So both runs have the same sets of units in their rounds.
2. Given the models before, a round without unit n is the same in both runs: it sums the updates of
   other units, which depend on their own rows, those models and fresh noise. It costs n nothing.
3. Given the models before, a round with unit n moves the sum by C at most, whatever the unit makes
   of these models; with noise of standard deviation z·C this is the Gaussian mechanism. What
   follows from its result, such as the next clip norm, costs nothing.
4. So to unit n the run is the adaptive composition of k_n Gaussian mechanisms of z, which is one of
   z/√k_n, exactly (Dong, Roth and Su 2022). Mechanisms of different z_i, of several
   runs, are one of 1/√(Σ 1/z_i²), also if z_i is chosen after earlier results were seen and the
   sum is bounded in advance (privacy filters: Feldman and Zrnic 2021; Smith and Thakurta 2022).

Noise that units add in whole numbers is not Gaussian. Its Rényi divergences are at most the
Gaussian's, and they add up over the rounds of a unit in the same way, which makes ε somewhat
larger. There the zeros in place of updates have the unit's noise, and the adversary may be the
server or another unit.
"""

from bisect import bisect_right
from math import inf, sqrt

from collapipe.sections import PrivacySettings

_MOST_ROUNDS = 10**9


def epsilon(settings: PrivacySettings, rounds: int) -> float:
    """ε at ``settings.delta`` of a unit that took part in ``rounds``; infinite without noise."""
    if not rounds:
        return 0.0
    if not settings.noise_multiplier:
        return inf
    together = rounds / settings.noise_multiplier**2
    return composed_epsilon(together, settings.delta, settings.noise_by == "units")


def affordable_rounds(settings: PrivacySettings, limit: float) -> int:
    """How many rounds a unit can take part in with ε ≤ ``limit``."""
    return bisect_right(range(1, _MOST_ROUNDS), limit, key=lambda t: epsilon(settings, t))


def composed_epsilon(squared: float, delta: float, by_units: bool) -> float:
    """ε at ``delta`` of rounds with noise multipliers z_i, whose ``squared`` is Σ 1/z_i² > 0;
    ``by_units`` if units have added the noise of any."""
    import dp_accounting  # which takes a second, and needs scipy's statistics
    from dp_accounting.rdp import RdpAccountant

    together = 1 / sqrt(squared)
    if by_units:
        account = RdpAccountant().compose(dp_accounting.GaussianDpEvent(together))
        return float(account.get_epsilon(delta))
    return float(dp_accounting.get_epsilon_gaussian(together, delta))
