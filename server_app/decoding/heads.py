"""The heads of a round, which the decoder link serves: one per scheduled unit, or one for all."""

import logging
import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError
from collapipe.models.part import HeadPart, prefixed, select
from collapipe.models.split import HEAD, build_empty
from collapipe.plan import ClusterPlan
from collapipe.tensors import Tensors, aligned, not_finite
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.messages import Failure, LinkAddress
from server_app.decoding.decoder import DecoderSession, OnStep
from server_app.decoding.link import DecoderLinkServer

_log = logging.getLogger(__name__)
_SHARED = -1  # key of the optimiser state if all units share a head


@dataclass
class Heads:
    """Opens the sessions of a round, and returns their results after it."""

    settings: Settings
    vocabulary: Vocabulary
    link: DecoderLinkServer | None  # None if units have the heads, so that there are no sessions
    on_step: OnStep
    fixed: Tensors  # the head's frozen weights by their names in it; sessions share them
    # Optimiser states by unit, kept from round to round and updated by units that finished. They
    # include the state of a head that trains on its unit if the scheduler chooses its place.
    states: dict[int, Tensors] = field(default_factory=dict)
    # received activations by unit, with ``compression.feedback``; kept like ``states``
    memories: dict[int, ActivationMemory] = field(default_factory=dict)
    _sessions: dict[int, DecoderSession] = field(default_factory=dict)
    _initial_head: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared = self.link is not None and self.settings.decoder.mode == "shared"
        self.fixed = {name: aligned(each) for name, each in self.fixed.items()}  # one copy for all

    def open(
        self,
        round_: int,
        models: Mapping[int, Tensors],
        plans: Collection[ClusterPlan],
        num_rows: Mapping[int, int],
    ) -> dict[int, LinkAddress]:
        """Open a session for each unit with a head on the server. Returns the links' addresses.

        ``models`` are the models from which the units start. ``plans`` have each unit's precisions
        and the place of its head. ``num_rows`` is the size of each unit's shard. A shared head is
        taken from the first model, because all units then have the same model.
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

    def packed_memories(self) -> dict[int, Tensors]:
        """Return the received activations by unit, for a checkpoint."""
        return {unit: memory.pack() for unit, memory in self.memories.items()}

    def restore(
        self, states: Mapping[int, Tensors], packed_memories: Mapping[int, Tensors]
    ) -> None:
        """Restore the optimisers' states and the received activations of a checkpoint."""
        dim, dtype = self.settings.model.dim, getattr(torch, self.settings.pipeline.dtype)
        self.states = dict(states)
        self.memories = {
            unit: ActivationMemory.unpack(packed, dim, dtype)
            for unit, packed in packed_memories.items()
        }

    def remembered(self, unit: int) -> ActivationMemory:
        """The unit's activations that arrived in the rounds that it finished."""
        return self.memories.get(unit, ActivationMemory())

    def close(self) -> None:
        """End all streams of the round; after this no head changes."""
        if self.link is not None:
            self.link.close()

    def target_tokens(self, unit: int) -> int | None:
        """Number of target tokens on which the unit's session was trained; 0 unless it saw all
        steps, None if the unit has no session."""
        if (session := self._sessions.get(unit)) is None:
            return None
        return session.target_tokens if session.complete else 0

    def weights(self, unit: int) -> Tensors:
        """The weights that the unit's session trained; empty without a session."""
        if unit not in self._sessions:
            return {}
        frozen = prefixed(HEAD, self.fixed).keys()
        head = self._sessions[unit].part.weights()
        return {name: each for name, each in head.items() if name not in frozen}

    def own_weights(self, unit: int) -> Tensors:
        """Like ``weights``, but empty if units share the head."""
        return {} if self._shared else self.weights(unit)

    def failure(self, unit: int) -> Failure | None:
        """Return a failure if the unit's head cannot be averaged, because a loss, norm or weight is
        not finite. Return None if it can."""
        if (session := self._sessions.get(unit)) is None:
            return None
        why, weight = session.diverged, not_finite(self.own_weights(unit))
        if why is None and weight is not None:
            why = f"round {session.round}: {weight} is NaN or infinite; lower optimizer.lr"
        return None if why is None else Failure(NonFiniteLossError.__name__, why)

    def common_weights(self, finished: Collection[int]) -> Tensors:
        """The weights of a shared head; empty if heads are not shared. If a unit failed, its steps
        cannot be undone, so these are the weights from before the round."""
        if not self._shared:
            return {}
        if self._sessions.keys() - set(finished):
            _log.warning(
                "the head learned nothing in this round: units that failed have changed it, too; "
                "with decoder.mode=per_cluster each unit has its own"
            )
            return self._initial_head
        return self.weights(next(iter(self._sessions)))

    def keep_states(self, units: Mapping[int, Tensors]) -> None:
        """Keep the optimiser states and activations of the units that finished. ``units`` has the
        states that units with a head returned."""
        finished = {unit: each for unit, each in self._sessions.items() if unit in units}
        for unit, session in finished.items():
            if session.coder is not None:
                self.memories[unit] = session.coder.known.after(session.coder.arrived)
        failed = len(finished) < len(self._sessions)
        if self.settings.optimizer.state == "reset" or (self._shared and failed):
            return
        self.states |= {unit: state for unit, state in units.items() if state}
        for unit, session in finished.items():
            owner = _SHARED if self._shared else unit
            self.states[owner] = session.part.optimizer_state()

    def _build(self, weights: Tensors, owner: int) -> HeadPart:
        settings = self.settings
        trained = {name: value.clone() for name, value in select(weights, HEAD).items()}
        own = self.fixed | trained
        module = build_empty(lambda: settings.model.build_head(self.vocabulary), own)
        state, device = self.states.get(owner, {}), settings.server_device
        return HeadPart(HEAD, module, settings.optimizer, state, device)
