"""Check names of labels, because they are printed, drawn and sent to other machines."""

from collapipe.errors import is_printable

MOST_LABELS = 10_000  # different labels in a run
LONGEST_LABEL = 200  # characters
_SHOWN = 40


def fault_of_label(name: str) -> str:
    """Return why a label cannot have this name; empty if it can."""
    shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"
    if not 0 < len(name) <= LONGEST_LABEL:
        return f"label {shown} has {len(name):,} characters, a label has 1 to {LONGEST_LABEL}"
    if not is_printable(name):
        return f"label {shown} has a control character or half a character; remove it"
    return ""
