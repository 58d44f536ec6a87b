"""Aggregate the updates of a round into the next model: an average, a clipped sum with noise, or
a sum of masked updates."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from flwr.app import RecordDict

from collapipe.config import Settings
from collapipe.errors import Called
from collapipe.sections import FederationSettings
from collapipe.seeds import derive
from collapipe.tensors import Tensors
from collapipe.wire.messages import Failure, TrainReply
from server_app.rounds.global_model import GlobalModel, Updates
from server_app.rounds.private_mean import ClippedSum, PrivateMean
from server_app.rounds.secure_sum import SecureSum
from server_app.units import Units

OnAccount = Callable[[Mapping[int, int]], None]
"""Receives, for each unit, the number of rounds that its ε is charged for."""


def weights_in_average(
    finished: Mapping[int, TrainReply], federation: FederationSettings
) -> dict[int, float]:
    """Return each unit's weight in the average, not normalised: its target tokens, or 1 with
    ``federation.weighting=uniform``; at most ``federation.max_share`` times the equal weight."""
    if not finished:
        return {}
    if federation.weighting == "uniform":
        weights = dict.fromkeys(finished, 1.0)
    else:
        weights = {u: float(each.report.target_tokens) for u, each in finished.items()}
    return capped(weights, federation.max_share)


def capped(weights: Mapping[int, float], most: float) -> dict[int, float]:
    """Cut weights in an average so that no weight exceeds ``most`` ≥ 1 times the equal weight.

    The k largest of N weights are cut to λ = c·R/(N − c·k). Here c is ``most``, R is the sum of the
    other weights, and k is the least number that leaves no weight above λ.
    """
    ordered = sorted(weights.values(), reverse=True)
    cap = ordered[-1]
    for cut, largest in enumerate(ordered):
        others, left = sum(ordered[cut:]), len(ordered) - most * cut
        if largest * left <= most * others:
            cap = most * others / left if left > 0 else largest
            break
    return {unit: min(weight, cap) for unit, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class Ready:
    """The planned units that can train in a round, with additional records for their messages,
    and the failures of the other planned units."""

    messages: Mapping[int, RecordDict]
    failures: Mapping[int, Failure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The result of a round's aggregation.

    ``bytes_up`` and ``bytes_down`` count the round's messages except ``train`` and its replies.
    """

    moved: float | None = None  # ‖θ(t+1) − θ(t)‖; None if nothing was averaged
    skipped: str | None = None  # why the updates were not used, if they were not
    late: Mapping[int, Failure] = field(default_factory=dict)  # failures after updates had arrived
    dishonest: Collection[int] = ()  # units of ``late`` whose failure is certainly their own fault
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Aggregation:
    """Federated averaging, or each unit's own model if the framework does not aggregate.

    Call ``open`` before units train and ``close`` with their updates. ``independent`` is False if
    one unit can cause the failure of others.
    """

    independent: ClassVar[bool] = True
    model: GlobalModel
    called: Called

    @property
    def clip_norm(self) -> float | None:
        """Bound of each update's norm; None disables clipping."""
        return None

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far; None without noise."""
        return None

    def open(self, units: Units, round_: int, planned: Sequence[int]) -> Ready:
        """Prepare the ``planned`` units, at least one, for the round. Raises ``BudgetSpentError``
        if a further round would exceed ``privacy.max_epsilon``."""
        return Ready({unit: RecordDict() for unit in planned})

    def expected(self, sent: Tensors) -> Tensors | None:
        """Tensors without values, shaped like the reply of a unit that was ``sent`` these weights.
        None if the unit returns the weights themselves."""
        return None

    def close(self, round_: int, updates: Updates) -> Aggregated:
        """Make the next model from the updates of the units that finished. Raises
        ``NonFiniteLossError`` if a weight would not be finite; the model is then unchanged."""
        if not updates.models:
            return Aggregated(skipped="every unit failed")
        return Aggregated(self._moved(round_, updates))

    def pack(self) -> Tensors:
        """Return the state that lasts from round to round, for a checkpoint."""
        return {}

    def restore(self, packed: Tensors, account: Mapping[int, int]) -> None:
        """Restore the state of a checkpoint; ``account`` is the number of rounds that ε counts for
        each unit."""

    def _moved(self, round_: int, updates: Updates) -> float | None:
        """Make the next model of at least one update. Returns by how much it moved."""
        return self.model.learn(round_, updates, self.called)


@dataclass
class PrivateAggregation(Aggregation):
    """The mean of clipped updates with differentially private noise; see ``PrivateMean``."""

    settings: Settings
    mean: PrivateMean
    on_account: OnAccount

    @property
    def clip_norm(self) -> float:
        return self.mean.clip_norm

    @property
    def epsilon(self) -> float | None:
        return self.mean.epsilon

    def open(self, units: Units, round_: int, planned: Sequence[int]) -> Ready:
        self.mean.check(planned, self.called)
        return super().open(units, round_, planned)

    def pack(self) -> Tensors:
        return self.mean.packed()

    def restore(self, packed: Tensors, account: Mapping[int, int]) -> None:
        if packed:
            self.mean.restore(packed, account)

    def _moved(self, round_: int, updates: Updates) -> float:
        summed = self.mean.summed(updates.models.values(), self.model.weights)
        return self._moved_by(round_, updates.models, summed)

    def _moved_by(self, round_: int, units: Collection[int], summed: ClippedSum) -> float:
        """Move the model by the sum with noise; the account is updated before anyone sees it."""
        seed = derive(self.settings.privacy.noise_seed or 0, "privacy", round_)
        mean = self.mean.mean(summed, self.model.weights, seed)
        self._count("server", units)
        return self.model.move(round_, mean)

    def _count(self, noise_by: Literal["server", "units"], units: Collection[int]) -> None:
        """Charge the ``units`` for a round if ``noise_by``, the server or the units, adds noise."""
        privacy = self.settings.privacy
        if privacy.noise_multiplier and privacy.noise_by == noise_by:
            self.mean.charge(units)
            self.on_account(self.mean.rounds)


@dataclass
class MaskedAggregation(PrivateAggregation):
    """Like ``PrivateAggregation``, with masked updates: the server learns only their sum.

    If units add the noise, a sum's units are charged before the server learns it, because ε then
    also holds towards the server. The round counts even if its sum is never used.
    """

    independent: ClassVar[bool] = False
    _sum: SecureSum = field(init=False)  # of the round

    def open(self, units: Units, round_: int, planned: Sequence[int]) -> Ready:
        super().open(units, round_, planned)
        self._sum = SecureSum(
            units=units,
            round=round_,
            planned=planned,
            clip_norm=self.mean.clip_norm,
            before_sum=partial(self._count, "units"),
        )
        self._sum.open()
        return Ready(self._sum.requests, self._sum.failures)

    def expected(self, sent: Tensors) -> Tensors | None:
        return self._sum.expected(sent)

    def close(self, round_: int, updates: Updates) -> Aggregated:
        summed = self._sum.sum(updates.models, self.model.weights)
        moved = self._moved_by(round_, updates.models, summed) if summed else None
        own = self._sum
        return Aggregated(
            moved, own.skipped, own.failures, own.dishonest, own.bytes_up, own.bytes_down
        )


def aggregation_of(
    settings: Settings, model: GlobalModel, called: Called, on_account: OnAccount
) -> Aggregation:
    """Return the aggregation that the options select."""
    if settings.privacy.clip_norm is None:
        return Aggregation(model, called)
    kind = MaskedAggregation if settings.privacy.secure_aggregation else PrivateAggregation
    mean = PrivateMean(settings.privacy, settings.privacy.clip_norm)
    return kind(model, called, settings, mean, on_account)
