"""A round in which the server learns only the sum of the updates, in five steps: keys, shares,
masked updates, survivors, unmasking."""

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from flwr.app import RecordDict

from collapipe.errors import RoundFailedError, WireError, few_of
from collapipe.secure_aggregation.messages import (
    KeysReply,
    KeysRequest,
    Roster,
    SharesReply,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.quantising import Quantiser
from collapipe.secure_aggregation.server import (
    CheckedShares,
    checked,
    confirmed,
    in_conflict,
    relayed,
    unmask,
    usable,
)
from collapipe.secure_aggregation.session import Session, units_needed
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.messages import Failure
from server_app import questions
from server_app.questions import Question
from server_app.rounds.private_mean import ClippedSum
from server_app.units import Units

_log = logging.getLogger(__name__)
_ANSWER_S = 60.0  # for questions that need little computation
T = TypeVar("T", KeysReply, SharesReply, SurvivorsReply, UnmaskReply)


@dataclass
class SecureSum:
    """The sum of the ``planned`` units' changes in one round.

    If units refuse the keys of others (``in_conflict``), the remaining ones make new keys, once.
    ``requests`` are added to the ``train`` messages of the units that are ready. ``failures`` has
    the reasons of the other units, and of units that fail later; those of ``dishonest`` units are
    certainly their own fault. ``skipped`` is the reason if the round cannot be used.
    ``before_sum`` is called with the units of the sum before the server can learn it. ``bytes_up``
    and ``bytes_down`` count all messages except the masked updates.
    """

    units: Units
    round: int
    planned: Sequence[int]
    clip_norm: float
    before_sum: Callable[[Collection[int]], None]
    failures: dict[int, Failure] = field(default_factory=dict)
    dishonest: set[int] = field(default_factory=set)
    requests: dict[int, RecordDict] = field(default_factory=dict)
    skipped: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0

    def __post_init__(self) -> None:
        self._need = max(2, units_needed(len(self.planned), self.units.settings.privacy.threshold))

    def open(self) -> None:
        """Ask the units to make keys and to share them. Sets ``skipped`` if too few did."""
        try:
            self._open()
        except RoundFailedError as error:
            self.skipped = str(error)

    def sum(self, masked: Mapping[int, Tensors], like: Tensors) -> ClippedSum | None:
        """Return the sum of the units' changes; ``like`` has the names and shapes of the weights.

        Returns None and sets ``skipped`` if too few units sent masked updates or revealed their
        shares, or if a unit broke the protocol.
        """
        if self.skipped is None:
            try:
                return self._sum(masked, like)
            except (RoundFailedError, WireError) as error:
                self.skipped = str(error)
        return None

    def _open(self) -> None:
        roster = self._roster(self.planned)
        replies = self._shares(roster)
        if excluded := self._in_conflict(roster, replies):
            roster = self._roster([unit for unit in replies if unit not in excluded])
            replies = self._shares(roster)
            self._in_conflict(roster, replies)
        self._session = Session(roster, self.units.settings.privacy.threshold)
        sent = {u: each for u, each in replies.items() if u not in self.failures}
        self._shared = {u: each for u, each in sent.items() if self._for_all(each)}
        self._check_enough(self._shared, "shared their keys")
        requests = relayed(self._shared)
        self.requests = {unit: records.pack(each) for unit, each in requests.items()}
        self.bytes_down += sum(map(records.text_bytes, self.requests.values()))

    def _roster(self, units: Collection[int]) -> Roster:
        """Ask ``units`` for their keys. Raises ``RoundFailedError`` if too few have usable ones."""
        contents = dict.fromkeys(units, records.pack(KeysRequest(self.round)))
        replies = self._ask(questions.MASK_KEYS, contents)
        keys = usable({unit: each.keys for unit, each in replies.items()})
        signed = {unit: replies[unit].signed for unit in keys}
        run = self.units.grid.run.run_id
        roster = Roster(run, self.round, keys, {u: each for u, each in signed.items() if each})
        for unit in replies.keys() - roster.keys.keys():
            self._fail(unit, "sent weak keys, or another unit's keys")
        self._check_enough(roster.keys, "sent keys")
        return roster

    def _shares(self, roster: Roster) -> dict[int, SharesReply]:
        contents = dict.fromkeys(roster.keys, records.pack(roster))
        return self._ask(questions.mask_shares(len(contents)), contents)

    def _in_conflict(self, roster: Roster, replies: Mapping[int, SharesReply]) -> set[int]:
        """Return the units that refuse others' keys, or whose keys others refuse, and record their
        failures."""
        refusals = {u: roster.keys.keys() & each.refused for u, each in replies.items()}
        excluded = in_conflict(refusals, self._need)
        for unit in excluded:
            self._fail(unit, self._conflict(unit, refusals))
        return excluded

    def _conflict(self, unit: int, refusals: Mapping[int, Collection[int]]) -> str:
        """Describe whose keys ``unit`` refuses, or who refuses its own."""
        called = self.units.places.called
        by = [called(each) for each, others in refusals.items() if unit in others]
        if len(by) >= self._need or not refusals[unit]:
            return f"is not listed in privacy.peers of the owners' files of {few_of(by, ', ')}"
        own = few_of(map(called, sorted(refusals[unit])), ", ")
        return f"its owner's file does not list {own} in privacy.peers"

    def _for_all(self, reply: SharesReply) -> bool:
        """Whether a unit has sent all shares and digests; if not, record its failure."""
        others, units = self._session.others(reply.unit), self._session.keys.keys()
        if reply.sealed.keys() == others and reply.digests.keys() == units:
            return True
        if refused := units & {*reply.refused}:  # then an honest unit shares nothing, either
            names = few_of(map(self.units.places.called, sorted(refused)), ", ")
            self._fail(reply.unit, f"refuses the keys of {names}")
        else:
            self._blame(reply.unit, "sent shares for the wrong units")
        return False

    def _fail(self, unit: int, why: str) -> None:
        self.failures[unit] = Failure(WireError.__name__, why)

    def _blame(self, unit: int, why: str) -> None:
        self._fail(unit, why)
        self.dishonest.add(unit)

    def _quantiser(self, like: Tensors) -> Quantiser:
        size = sum(each.numel() for each in like.values() if each.is_floating_point())
        upload, privacy = self.units.settings.compression.upload, self.units.settings.privacy
        return Quantiser.of(upload, privacy, size, self.clip_norm, len(self._session.keys))

    def expected(self, like: Tensors) -> Tensors:
        """A tensor without values, shaped like the masked update of the weights ``like``."""
        size = self._quantiser(like).num_bytes
        return {records.MASKED: torch.empty(size, dtype=torch.uint8, device="meta")}

    def _sum(self, masked: Mapping[int, Tensors], like: Tensors) -> ClippedSum:
        self._check_enough(masked, "sent masked updates")
        requests = self._confirmed(masked.keys())
        self.before_sum(masked.keys())
        shares, quantiser = self._revealed(masked.keys(), requests), self._quantiser(like)
        words = (quantiser.unpack(each[records.MASKED].numpy()) for each in masked.values())
        total = functools.reduce(np.add, words)  # one by one, for they are large
        terms = records.masked_terms(self.units.setup, self.clip_norm, like)
        unmask(self._session, masked, shares, total, self.units.places.called, terms)
        values = torch.from_numpy(quantiser.restored(total, len(masked)))
        names = sorted(name for name, each in like.items() if each.is_floating_point())
        parts = torch.split(values, [like[name].numel() for name in names])
        changes = {
            name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)
        }
        return ClippedSum(changes, len(masked))

    def _confirmed(self, survivors: Collection[int]) -> dict[int, UnmaskRequest]:
        """Ask the units that sent masked updates to confirm that the sum is theirs. Returns their
        requests to reveal shares."""
        request = records.pack(SurvivorsRequest(self.round, tuple(survivors)))
        contents = dict.fromkeys(survivors, request)
        replies = self._ask(questions.survivors(len(survivors)), contents)
        for unit, each in [*replies.items()]:
            if each.confirmations.keys() != {*survivors} - {unit}:
                self._blame(unit, "confirmed the survivors to the wrong units")
                del replies[unit]
        self._check_enough(replies, "confirmed the survivors")
        return confirmed(self.round, replies)

    def _revealed(
        self, survivors: Collection[int], requests: Mapping[int, UnmaskRequest]
    ) -> CheckedShares:
        """Ask the units to reveal their shares of the survivors' and the others' secrets. Returns
        the valid shares."""
        called = self.units.places.called
        contents = {unit: records.pack(each) for unit, each in requests.items()}
        revealed = self._ask(questions.unmask(len(self._session.keys)), contents)
        for unit in {*survivors} - revealed.keys():
            why = self.failures[unit].message
            _log.warning("round %d: %s reveals no shares: %s", self.round, called(unit), why)
        shares = checked(self._shared, survivors, revealed)
        unopened = few_of(
            f"{called(holder)} cannot open the shares of {called(owner)}"
            for holder, owner in sorted(shares.missing)
        )
        if unopened:
            _log.warning("round %d: %s", self.round, unopened)
        for suspect in shares.suspects(called):
            _log.warning("round %d: %s sent wrong shares", self.round, suspect)
        for unit in shares.dishonest(self._need):
            self._blame(unit, "sent wrong shares")
        return shares

    def _ask(self, question: Question[T], contents: Mapping[int, RecordDict]) -> dict[int, T]:
        """Return the usable answers; record the other units in ``failures``."""
        self.bytes_down += sum(map(records.text_bytes, contents.values()))

        def unpack(content: RecordDict) -> T:
            self.bytes_up += records.text_bytes(content)
            return question.unpack(content)

        counted = replace(question, unpack=unpack)
        asked = {unit: (counted, content) for unit, content in contents.items()}
        answers = self.units.ask(asked, _ANSWER_S)
        replies = dict[int, T]()
        for unit, each in answers.items():
            if isinstance(each, Failure):
                self.failures[unit] = each
            elif each.unit != unit:
                self._fail(unit, f"answered as unit {each.unit}")
            else:
                replies[unit] = each
        return replies

    def _check_enough(self, units: Mapping[int, object], did: str) -> None:
        if len(units) < self._need:
            threshold = self.units.settings.privacy.threshold
            raise RoundFailedError(
                f"{len(units)} of {len(self.planned)} units {did}, expected {self._need} or more "
                f"(privacy.threshold={threshold:.3g}; a sum of one hides nothing)"
            )
