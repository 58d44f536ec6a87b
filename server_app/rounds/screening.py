"""What limits a unit that lies: outlying updates stay out, shares and figures are cut."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch

from collapipe.privacy.clipping import update_norm, weights_norm
from collapipe.tensors import Tensors
from collapipe.wire.messages import Failure
from server_app.rounds.global_model import GlobalModel

OUTLYING = "OutlyingUpdate"
"""The kind of failure of a unit whose update is not averaged."""
BELIEVED = 10.0
"""So many times the median of the units' is the most that one's loss, or gradient norm, counts for
where ``federation.max_update_norm`` says nothing."""
_MAJORITY = 3  # so many units can outvote one
_REMEMBERED = 5  # norms of each unit


@dataclass
class UpdateScreen:
    """Finds outlying updates; ``factor`` is ``federation.max_update_norm``, None: there are none.

    An update is outlying where its norm is above ``factor`` times the median of the round's, zeros
    left aside. Fewer than three units cannot outvote one another, so that earlier norms count as
    well: where three units or more have any, the median of each; else the unit's own; where
    it has none, that of all weights, as if they had moved as far. ``past`` are the last norms of
    updates that were averaged: unit → float64 [≤ 5].
    """

    factor: float | None
    past: Tensors = field(default_factory=dict)

    def judge(
        self, ends: Mapping[int, Tensors], starts: Mapping[int, Tensors], model: GlobalModel
    ) -> dict[int, Failure]:
        """Units whose weights ``ends``, which were ``starts``, are not averaged with the others';
        the ``model`` has the weights that were not sent."""
        if self.factor is None:
            return {}
        norms = {unit: update_norm(end, model.weights | starts[unit]) for unit, end in ends.items()}
        return self.outlying(norms, lambda: weights_norm(model.trained))

    def outlying(
        self, norms: Mapping[int, float], weights_norm: Callable[[], float]
    ) -> dict[int, Failure]:
        """Units whose update is outlying among the round's; the others' norms are remembered."""
        if self.factor is None:
            return {}
        found, moved = dict[int, Failure](), [norm for norm in norms.values() if norm]
        few = len(moved) < _MAJORITY
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
        for unit in norms.keys() - found.keys():
            last = [*self._own(str(unit)), norms[unit]][-_REMEMBERED:]
            self.past[str(unit)] = torch.tensor(last, dtype=torch.float64)
        return found

    def _earlier(self, unit: int) -> list[float]:
        """Norms of earlier rounds that an update of this unit is compared with."""
        if len(self.past) >= _MAJORITY:
            return [median_low(self._own(each)) for each in self.past]
        return self._own(str(unit))

    def _own(self, unit: str) -> list[float]:
        past = self.past.get(unit)
        return [] if past is None else [float(each) for each in past]


def bounded(values: Sequence[float], factor: float, before: Sequence[float]) -> list[float]:
    """Values, cut to 0 and ``factor`` times their median. Where they are fewer than three, those
    of rounds ``before`` count for it, too."""
    most = factor * median_low([*values, *before] if len(values) < _MAJORITY else values)
    return [max(0.0, min(each, most)) for each in values]


def capped(shares: Mapping[int, float], most: float) -> dict[int, float]:
    """Shares in an average, cut so that none is above ``most`` ≥ 1 times the equal one.

    Of N units the k largest are cut to λ = c·R/(N − c·k), in which c = ``most`` and R is the sum of
    the others, for the least k that leaves no share above λ.
    """
    ordered = sorted(shares.values(), reverse=True)
    cap = ordered[-1]
    for cut, largest in enumerate(ordered):
        rest, left = most * sum(ordered[cut:]), len(ordered) - most * cut
        if largest * left <= rest:
            cap = rest / left if left > 0 else largest
            break
    return {unit: min(share, cap) for unit, share in shares.items()}
