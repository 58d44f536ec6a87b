"""Limit the influence of a malicious unit: reject outlying updates."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import torch

from collapipe.privacy.clipping import update_norm, weights_norm
from collapipe.tensors import Tensors
from collapipe.wire.messages import Failure
from server_app.planning.estimates import MAJORITY
from server_app.rounds.global_model import GlobalModel

OUTLYING = "OutlyingUpdate"
"""The kind of failure of a unit whose update is not averaged."""
_REMEMBERED = 5  # norms of each unit


@dataclass
class UpdateScreen:
    """Finds outlying updates. ``factor`` is ``federation.max_update_norm``; None accepts all.

    An update is outlying if its norm is above ``factor`` times the median of the round's non-zero
    norms. Fewer than three units cannot outvote one another, so the median then includes earlier
    norms:

    - the median of each unit's earlier norms, if three or more units have some;
    - else the unit's own earlier norms;
    - else the norm of the model's weights.

    ``past`` has the last norms of updates that were averaged: unit → float64 [≤ 5].
    """

    factor: float | None
    past: Tensors = field(default_factory=dict)

    def judge(
        self, ends: Mapping[int, Tensors], starts: Mapping[int, Tensors], model: GlobalModel
    ) -> dict[int, Failure]:
        """Return a failure for each unit whose update is outlying.

        An update is the change from ``starts`` to ``ends``; the ``model`` has the start of weights
        that were not sent.
        """
        if self.factor is None:
            return {}
        norms = {unit: update_norm(end, model.weights | starts[unit]) for unit, end in ends.items()}
        return self.outlying(norms, lambda: weights_norm(model.weights))

    def outlying(
        self, norms: Mapping[int, float], weights_norm: Callable[[], float]
    ) -> dict[int, Failure]:
        """Return a failure for each outlying norm of a round, and remember the other norms but
        those of 0, to which none can be compared."""
        if self.factor is None:
            return {}
        found, moved = dict[int, Failure](), [norm for norm in norms.values() if norm]
        few = len(moved) < MAJORITY
        for unit, norm in norms.items():
            if not norm:
                continue
            earlier = (self._earlier(unit) or [weights_norm()]) if few else []
            typical = median_low([each for each in (*moved, *earlier) if each])
            if not math.isfinite(norm) or norm > self.factor * typical:
                found[unit] = Failure(
                    OUTLYING,
                    f"its weights moved by {norm:.3g}, the median is {typical:.3g}; "
                    f"federation.max_update_norm={self.factor:g} times that is averaged at most",
                )
        for unit in {unit for unit, norm in norms.items() if norm} - found.keys():
            last = [*self._own(str(unit)), norms[unit]][-_REMEMBERED:]
            self.past[str(unit)] = torch.tensor(last, dtype=torch.float64)
        return found

    def _earlier(self, unit: int) -> list[float]:
        """Norms of earlier rounds with which an update of this unit is compared."""
        if len(self.past) >= MAJORITY:
            return [median_low(self._own(each)) for each in self.past]
        return self._own(str(unit))

    def _own(self, unit: str) -> list[float]:
        past = self.past.get(unit)
        return [] if past is None else [float(each) for each in past]
