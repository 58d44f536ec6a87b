"""What a label may be called: names of labels are printed, drawn and sent to others."""

from collapipe.errors import is_printable

MOST_LABELS = 10_000  # different ones in a run
LONGEST_LABEL = 200  # characters
_SHOWN = 40


def fault_of_label(name: str) -> str:
    """Why no label can be called ``name``; empty if one can."""
    shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"
    if not 0 < len(name) <= LONGEST_LABEL:
        return f"label {shown} has {len(name):,} characters, a label has 1 to {LONGEST_LABEL}"
    if not is_printable(name):
        return f"label {shown} has a control character or half a character; remove it"
    return ""
