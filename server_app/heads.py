"""The heads of a round: one per scheduled unit, or one that all share, behind the decoder link."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from collapipe.config import Settings
from collapipe.messages import LinkAddress
from collapipe.models.part import HeadPart, Tensors, prefixed, select
from collapipe.models.split import HEAD, build_empty
from collapipe.tasks.tokenizer import Vocabulary
from server_app.decoder import DecoderSession, OnStep, SessionPlan
from server_app.link import DecoderLinkServer

_SHARED = -1  # whose optimiser state it is when all units share a head


class Heads:
    """Opens sessions for a round and, when it is over, knows what they learned.

    Optimiser states last from round to round, keyed by unit; only those of units that finished
    are kept.
    """

    def __init__(
        self, settings: Settings, vocabulary: Vocabulary, link: DecoderLinkServer, on_step: OnStep
    ) -> None:
        self._settings, self._vocabulary = settings, vocabulary
        self._link, self._on_step = link, on_step
        self.shared = settings.decoder.mode == "shared"
        self._states: dict[int, Tensors] = {}
        self._sessions: dict[int, DecoderSession] = {}
        self._addresses: list[LinkAddress] = []
        self._first: Tensors = {}

    def open(self, round_: int, weights: Tensors, units: Sequence[int]) -> dict[int, LinkAddress]:
        """A session for each unit, from the global model's ``weights``, and how to reach it."""
        self._first = prefixed(HEAD, select(weights, HEAD))
        turn: AbstractContextManager[object] = threading.Lock() if self.shared else nullcontext()
        common = self._build(weights, _SHARED) if self.shared else None
        self._sessions = {
            unit: DecoderSession(
                self._plan(unit, round_),
                common or self._build(weights, unit),
                self._settings.optimizer,
                turn,
                self._on_step,
            )
            for unit in units
        }
        addresses = {unit: self._link.open(session) for unit, session in self._sessions.items()}
        self._addresses = list(addresses.values())
        return addresses

    def close(self) -> None:
        """The round is over: streams end, wherever they are, and nothing changes any more."""
        self._link.close(self._addresses)
        self._addresses = []

    def target_tokens(self, unit: int) -> int:
        """Target tokens that the unit's session was trained on; 0 unless it saw all steps."""
        session = self._sessions[unit]
        return session.target_tokens if session.complete else 0

    def weights(self, unit: int) -> Tensors:
        """The head that the unit's session trained."""
        return self._sessions[unit].part.weights()

    def common_weights(self) -> Tensors:
        """The shared head; as it was at first if a unit failed, for its steps cannot be undone."""
        return self.weights(next(iter(self._sessions))) if self._all_complete else self._first

    def keep_states(self, units: Iterable[int]) -> None:
        """Remember the optimisers of the units that finished."""
        if self._settings.optimizer.state == "reset" or (self.shared and not self._all_complete):
            return
        for unit in units:
            owner = _SHARED if self.shared else unit
            self._states[owner] = self._sessions[unit].part.optimizer_state()

    @property
    def _all_complete(self) -> bool:
        return all(session.complete for session in self._sessions.values())

    def _build(self, weights: Tensors, owner: int) -> HeadPart:
        spec, optimizer = self._settings.model, self._settings.optimizer
        copies = {name: value.clone() for name, value in select(weights, HEAD).items()}
        module = build_empty(lambda: spec.build_head(self._vocabulary), copies)
        return HeadPart(HEAD, module, optimizer, self._states.get(owner, {}))

    def _plan(self, unit: int, round_: int) -> SessionPlan:
        settings = self._settings
        return SessionPlan(
            unit,
            round_,
            settings.seed,
            settings.model.num_blocks,
            settings.model.dim,
            settings.federation.steps_of(round_),
            settings.federation.total_steps,
            self._vocabulary.size,
            settings.batch_size,
            settings.task.max_length,
        )
