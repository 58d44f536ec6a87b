"""Map nodes to units of the run: by the node's name, or by its number if it has no name."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from collapipe.errors import WireError, one_line, unit_called
from collapipe.wire.messages import Failure, RowsReply, StateReply
from server_app.questions import apart

Numbered = TypeVar("Numbered", RowsReply, StateReply)


@dataclass
class Places:
    """The places of units by their names. A name keeps its first place, with its queues, losses and
    checkpointed state, even if its node later reports another number.

    On a federation's server the node's name is the one in its certificate. ``signed`` returns these
    names by node; it is None if nodes have no certificates. ``reserved`` are the places of the
    federation's units, in the order of ``server.yaml``.

    ``failed`` nodes sent no usable reply on their rows; the ``barred`` nodes among them take no
    part until they connect again.
    """

    of: dict[str, int] = field(default_factory=dict)
    signed: Callable[[], Mapping[int, str]] | None = None
    reserved: Mapping[str, int] = field(default_factory=dict)
    failed: dict[int, Failure] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    def name(self, place: int) -> str:
        """The name at a place; empty if the place is free or its unit has no name."""
        free = {name: own for name, own in self.reserved.items() if name not in self.of}
        return next((name for name, own in [*self.of.items(), *free.items()] if own == place), "")

    def called(self, place: int) -> str:
        """The name at a place, or else a text such as ``unit 0``."""
        return unit_called(place, self.name(place))

    def certified(self) -> Mapping[int, str]:
        """Names by node. This reads and verifies every certificate, so call it once per
        question."""
        return self.signed() if self.signed else {}

    def of_node(self, node: int, certified: Mapping[int, str]) -> str:
        """The name of a node for messages: from its certificate, or else Flower's number."""
        name, place = certified.get(node), self.place(node, certified)
        return (name or f"node {node}") if place is None else self.called(place)

    def place(self, node: int, certified: Mapping[int, str]) -> int | None:
        """The place of a node by its certificate alone; None if that gives no place."""
        return self._own(certified.get(node, ""))

    def _own(self, name: str) -> int | None:
        return self.of.get(name, self.reserved.get(name))

    def check_signed(self, node: int, name: str, certified: Mapping[int, str]) -> None:
        """Raise ``WireError`` if the reported ``name`` differs from the certificate's name."""
        if self.signed is None:
            return
        signed = certified.get(node)
        if signed is None:
            raise WireError(f"a node reported the name {name!r}, and has no valid certificate")
        if signed != name:
            raise WireError(f"a node reported the name {name!r}, its certificate names {signed}")

    def claim(self, name: str, number: int, num_units: int, taken: Container[int]) -> int:
        """Return the place of the node that reports ``name`` and ``number``. Raises ``WireError``
        if the place is out of range, in ``taken``, or belongs to another name."""
        own = self._own(name)
        place = number if own is None else own
        holder, called = self.name(place), name or "a node without a name"
        if not 0 <= place < num_units:
            raise WireError(f"a node reported to be unit {place}, expected 0 … {num_units - 1}")
        if holder and holder != name:
            raise WireError(
                f"unit {place} is {holder}, and {called} claims the same number; give one of "
                "them another, below federation.num_units"
            )
        if place in taken:
            conflict = f"are called {name}" if holder else f"reported to be unit {place}"
            required = "name" if holder else "partition-id"
            raise WireError(f"two nodes {conflict}; each needs a separate {required}")
        if name:
            self.of[name] = place
        return place

    def claim_all(
        self, answers: dict[int, Numbered | Failure], num_units: int, taken: set[int]
    ) -> None:
        """Set each answer's unit to the place of its node; replace the answer by a failure if the
        node gets no place. Places in ``taken`` belong to other nodes. Nodes with certified places
        go first."""
        replies, _ = apart(answers)
        certified = self.certified()
        for node in sorted(replies, key=lambda node: self.place(node, certified) is None):
            reply = replies[node]
            try:
                self.check_signed(node, reply.name, certified)
                unit = self.claim(reply.name, reply.unit, num_units, taken)
            except WireError as error:
                answers[node] = Failure("WireError", one_line(error))
            else:
                answers[node] = replace(reply, unit=unit)
                taken.add(unit)
