"""Shares of tokens with intervals over rows, and which tokens are frequent."""

import math

import torch
from scipy.special import ndtri
from torch import Tensor

from collapipe.audit.result import Share

_FREQUENT = 0.5  # of the public text
_Z = float(ndtri(0.975))


def share_of(hits: Tensor, counts: Tensor) -> Share | None:
    """Σ hits / Σ counts of rows [r], and Wilson's 95 % interval; None where nothing was counted.

    Tokens of a row are no independent trials. So the number of trials is what independent ones with
    the same variance would be (Kish's effective sample size; Korn and Graubard 1998), with the
    variance of a ratio of sums over rows. Where every row or none is recovered in full there is no
    variance, and each row counts as a trial.
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
    """Wilson (1927)."""
    spread = _Z * math.sqrt(share * (1 - share) / trials + (_Z / (2 * trials)) ** 2)
    low, high = (share + _Z**2 / (2 * trials) + s for s in (-spread, spread))
    shrunk = 1 + _Z**2 / trials
    return Share(share, min(share, max(0.0, low / shrunk)), max(share, min(1.0, high / shrunk)))


def frequent(ids: Tensor, size: int) -> Tensor:
    """True at the tokens, [size], that are the most frequent of ``ids`` and make up half of them;
    at the last of these, too."""
    counts = torch.bincount(ids, minlength=size)
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    found = torch.zeros(size, dtype=torch.bool)
    found[order[before < _FREQUENT * len(ids)]] = True
    return found
