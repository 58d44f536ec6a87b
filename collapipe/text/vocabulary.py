"""A tokeniser's properties that a model needs, without its library, and names of labels."""

from dataclasses import dataclass

from collapipe.errors import is_printable

MOST_LABELS = 10_000  # different labels in a run
LONGEST_LABEL = 200  # characters
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Number of tokens, ids of special tokens, and number of labels."""

    size: int
    pad: int
    bos: int
    eos: int
    num_labels: int = 0

    @property
    def num_classes(self) -> int:
        """Number of classes of a target: labels if the task has them, else tokens."""
        return self.num_labels or self.size


def fault_of_label(name: str) -> str:
    """Return why a label cannot have this name; empty if it can."""
    shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"
    if not 0 < len(name) <= LONGEST_LABEL:
        return f"label {shown} has {len(name):,} characters, a label has 1 to {LONGEST_LABEL}"
    if not is_printable(name):
        return f"label {shown} has a control character or half a character; remove it"
    return ""
