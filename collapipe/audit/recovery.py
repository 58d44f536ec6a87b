"""Shares of recovered tokens with intervals over rows, and the set of frequent tokens."""

import math

import torch
from scipy.special import ndtri
from torch import Tensor

from collapipe.audit.result import Share

_FREQUENT = 0.5  # of the public text
_Z = float(ndtri(0.975))


def share_of(hits: Tensor, counts: Tensor) -> Share | None:
    """Return Σ hits / Σ counts of rows [r] with Wilson's 95 % interval; None if counts are 0.

    Tokens of a row are not independent. So the interval uses the number of independent trials with
    the same variance (Kish's effective sample size; Korn and Graubard 1998). The variance is that
    for a ratio of sums over rows. If all rows have the same share, 0 or 1, the variance is 0, and
    each row counts as a trial.
    """
    rows, total = int((counts > 0).sum()), float(counts.sum())
    if not total:
        return None
    share = float(hits.sum()) / total
    residual = (hits - share * counts).double()
    variance = float(residual.square().sum()) / total**2 * rows / max(1, rows - 1)
    trials = min(total, share * (1 - share) / variance) if variance > 0 else float(rows)
    return _wilson(share, trials)


def _wilson(share: float, trials: float) -> Share:
    """Return Wilson's interval (1927)."""
    spread = _Z * math.sqrt(share * (1 - share) / trials + (_Z / (2 * trials)) ** 2)
    low, high = (share + _Z**2 / (2 * trials) + s for s in (-spread, spread))
    shrunk = 1 + _Z**2 / trials
    return Share(share, min(share, max(0.0, low / shrunk)), max(share, min(1.0, high / shrunk)))


def frequent(ids: Tensor, size: int) -> Tensor:
    """Return True, [size], for the most frequent tokens that together make up half of ``ids``.

    The token that reaches one half is included.
    """
    counts = torch.bincount(ids, minlength=size)
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    found = torch.zeros(size, dtype=torch.bool)
    found[order[before < _FREQUENT * len(ids)]] = True
    return found
