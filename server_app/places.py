"""Which unit of the run a node is: by its name, or by its number if it has none."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from collapipe.errors import WireError, unit_called
from collapipe.wire.messages import Failure


@dataclass
class Places:
    """The places of units by their names: a name keeps the place that it had first, with its
    queues, losses and what checkpoints hold, whatever number its node reports later.

    On a federation's server the certificate names the node, which cannot choose its name.
    ``signed`` returns these names by node; None: nodes have no certificates. ``reserved`` are the
    places of the federation's units, in the order of ``server.yaml``.

    ``failed`` nodes sent no usable reply on their rows; the ``barred`` nodes among them take no
    part until they connect again.
    """

    of: dict[str, int] = field(default_factory=dict)
    signed: Callable[[], Mapping[int, str]] | None = None
    reserved: Mapping[str, int] = field(default_factory=dict)
    failed: dict[int, Failure] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    def name(self, place: int) -> str:
        """Empty if the place is free, or its unit has no name."""
        free = {name: own for name, own in self.reserved.items() if name not in self.of}
        return next((name for name, own in [*self.of.items(), *free.items()] if own == place), "")

    def called(self, place: int) -> str:
        """Its name, or else such as ``unit 0``."""
        return unit_called(place, self.name(place))

    def certified(self) -> Mapping[int, str]:
        """Names by node. Reads and verifies every certificate, so it is called once a question."""
        return self.signed() if self.signed else {}

    def of_node(self, node: int, certified: Mapping[int, str]) -> str:
        """The name of a node in a message to users: by its certificate, or else Flower's number."""
        name = certified.get(node)
        place = None if name is None else self._own(name)
        return (name or f"node {node}") if place is None else self.called(place)

    def place(self, node: int, certified: Mapping[int, str]) -> int | None:
        """The place of a node that has sent nothing usable, by its certificate."""
        return self._own(certified.get(node, ""))

    def _own(self, name: str) -> int | None:
        return self.of.get(name, self.reserved.get(name))

    def check_signed(self, node: int, name: str, certified: Mapping[int, str]) -> None:
        """Raise ``WireError`` if a node reports another ``name`` than its certificate has."""
        if self.signed is None:
            return
        signed = certified.get(node)
        if signed is None:
            raise WireError(f"a node reported the name {name!r}, and has no valid certificate")
        if signed != name:
            raise WireError(f"a node calls itself {name!r}, its certificate is that of {signed}")

    def claim(self, name: str, number: int, num_units: int, taken: Container[int]) -> int:
        """The place of the node that reports ``name`` and ``number``; other nodes have the places
        that are ``taken``. Raises ``WireError`` if the node has none."""
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
            which = f"are called {name}" if holder else f"reported to be unit {place}"
            own_what = "name" if holder else "partition-id"
            raise WireError(f"two nodes {which}; each needs a {own_what} of its own")
        if name:
            self.of[name] = place
        return place
