"""Which unit of the run a node is: by its name, or by its number where nobody has named it."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from collapipe.errors import WireError


def check_signed(name: str, signed: str) -> None:
    """Raise ``WireError`` where a node calls itself what its certificate does not."""
    if name != signed:
        raise WireError(f"a node calls itself {name!r}, its certificate is that of {signed}")


@dataclass
class Places:
    """Of units by their names. A name keeps the place that it had first, whatever number its box
    tells later: queues, losses and what checkpoints hold are its. ``signed`` are the names that
    deployed nodes have by their certificates, which they cannot choose."""

    of: dict[str, int] = field(default_factory=dict)
    signed: Callable[[], Mapping[int, str]] = dict

    def name(self, place: int) -> str:
        """Empty where it is nobody's, or nobody has named the unit."""
        return next((name for name, own in self.of.items() if own == place), "")

    def called(self, place: int) -> str:
        """Such as ``berlin (unit 0)``."""
        name = self.name(place)
        return f"{name} (unit {place})" if name else f"unit {place}"

    def claim(self, name: str, number: int, num_units: int, taken: Container[int]) -> int:
        """The place of the node that tells ``name`` and ``number``; those of other nodes are
        ``taken``. Raises ``WireError`` where it has none."""
        place = self.of.get(name, number)
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
            own = "name" if holder else "partition-id"
            raise WireError(f"two nodes {which}; each needs a {own} of its own")
        if name:
            self.of[name] = place
        return place
