"""The heads of a round: one per scheduled unit, or one that all share, behind the decoder link."""

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError
from collapipe.models.part import HeadPart, prefixed, select
from collapipe.models.split import HEAD, build_empty
from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors, not_finite
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.messages import Failure, LinkAddress
from server_app.decoding.decoder import DecoderSession, OnStep
from server_app.decoding.link import DecoderLinkServer

_SHARED = -1  # whose optimiser state it is when all units share a head


@dataclass
class Heads:
    """Opens sessions for a round and, when it is over, knows what they learned.

    Without a ``link`` there are none: units have heads of their own. ``frozen`` names weights that
    do not train: sessions share them. ``states`` are the optimisers', which last from round to
    round, keyed by unit; only those of units that finished are kept. A head whose place the
    scheduler chooses has its state here, too, while it trains on its unit. ``memories`` are what
    arrived of the units' activations, with ``compression.feedback``; kept likewise.
    """

    settings: Settings
    vocabulary: Vocabulary
    link: DecoderLinkServer | None
    on_step: OnStep
    frozen: Collection[str]
    states: dict[int, Tensors] = field(default_factory=dict)
    memories: dict[int, ActivationMemory] = field(default_factory=dict)
    _sessions: dict[int, DecoderSession] = field(default_factory=dict)
    _initial_head: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared = self.link is not None and self.settings.decoder.mode == "shared"

    def open(
        self,
        round_: int,
        models: Mapping[int, Tensors],
        plans: Collection[ClusterPlan],
        num_rows: Mapping[int, int],
    ) -> dict[int, LinkAddress]:
        """A session for each unit, from the model that its round starts from, and how to reach it.

        ``plans`` say in which precisions units send, and who has the head by itself; ``num_rows``
        are those of the units' shards. A shared head is the first unit's, whose model is then
        everybody's.
        """
        if self.link is None:
            return {}
        away = {each.unit for each in plans if self.settings.unit_has_head(each.uplink)}
        models = {unit: model for unit, model in models.items() if unit not in away}
        first = next(iter(models.values()), {})
        self._initial_head = prefixed(HEAD, select(first, HEAD))
        turn: AbstractContextManager[object] = threading.Lock() if self._shared else nullcontext()
        common = self._build(first, _SHARED) if self._shared and models else None
        parts = {unit: common or self._build(model, unit) for unit, model in models.items()}
        settings, num_classes = self.settings, self.vocabulary.num_classes
        uplinks, self._sessions = {each.unit: each.uplink for each in plans}, {}
        for unit, part in parts.items():
            compression = settings.compression.of(uplinks[unit])
            self._sessions[unit] = DecoderSession(
                *(settings, unit, round_, num_classes, part, turn, self.on_step),
                activation=compression.activation,
                gradient=compression.gradient,
                coder=ChangeCoder(self.remembered(unit), round_, num_rows[unit])
                if compression.feedback
                else None,
            )
        return {unit: self.link.open(each) for unit, each in self._sessions.items()}

    def remembered(self, unit: int) -> ActivationMemory:
        """What arrived of the unit's activations in the rounds that it finished."""
        return self.memories.get(unit, ActivationMemory())

    def close(self) -> None:
        """The round is over: streams end, wherever they are, and nothing changes any more."""
        if self.link is not None:
            self.link.close()

    def target_tokens(self, unit: int) -> int | None:
        """Target tokens that the unit's session was trained on; 0 unless it saw all steps, None
        where it has none."""
        if (session := self._sessions.get(unit)) is None:
            return None
        return session.target_tokens if session.complete else 0

    def weights(self, unit: int) -> Tensors:
        """The head that the unit's session trained."""
        return self._sessions[unit].part.weights() if unit in self._sessions else {}

    def own_weights(self, unit: int) -> Tensors:
        """The same, where it is the unit's own."""
        return {} if self._shared else self.weights(unit)

    def failure(self, unit: int) -> Failure | None:
        """Why what the unit's session trained cannot be averaged: it saw a loss or a norm that is
        not finite, or has such weights; None: it can be."""
        if (session := self._sessions.get(unit)) is None:
            return None
        why, odd = session.diverged, not_finite(self.own_weights(unit))
        if why is None and odd is not None:
            why = f"round {session.round}: {odd} is NaN or infinite; lower optimizer.lr"
        return None if why is None else Failure(NonFiniteLossError.__name__, why)

    def common_weights(self, finished: Collection[int]) -> Tensors:
        """A shared head; as it was at first if a unit failed, for its steps cannot be undone."""
        if not self._shared:
            return {}
        failed = self._sessions.keys() - set(finished)
        return self._initial_head if failed else self.weights(next(iter(self._sessions)))

    def keep_states(self, units: Mapping[int, Tensors]) -> None:
        """Remember the optimisers of the units that finished, with what those told that had the
        head, and what arrived of their activations."""
        for unit, session in self._sessions.items():
            if unit in units and session.coder is not None:
                self.memories[unit] = session.coder.known.after(session.coder.arrived)
        failed = self._sessions.keys() - set(units)
        if self.settings.optimizer.state == "reset" or (self._shared and failed):
            return
        self.states |= {unit: told for unit, told in units.items() if told}
        for unit, session in self._sessions.items():
            if unit in units:
                owner = _SHARED if self._shared else unit
                self.states[owner] = session.part.optimizer_state()

    def _build(self, weights: Tensors, owner: int) -> HeadPart:
        settings = self.settings
        own = {
            name: value if f"{HEAD}.{name}" in self.frozen else value.clone()
            for name, value in select(weights, HEAD).items()
        }
        module = build_empty(lambda: settings.model.build_head(self.vocabulary), own)
        state, device = self.states.get(owner, {}), settings.server_device
        return HeadPart(HEAD, module, settings.optimizer, state, device)
