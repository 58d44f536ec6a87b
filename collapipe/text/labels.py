"""Names of labels and their ids."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from collapipe.errors import DataError

_SHOWN = 6  # names in a message


def count_labels(names: Iterable[str]) -> dict[str, int]:
    """How often each name stands there, in the order of the labels' ids.

    Names are sorted, by value where all are whole numbers: an order that depends neither on the
    rows' order nor on where they come from, so that a run on the same rows has the same ids.
    """
    counts = Counter(names)
    numeric = all(name.removeprefix("-").isdecimal() for name in counts)
    ordered = sorted(counts, key=lambda name: (int(name) if numeric else 0, name))
    return {name: counts[name] for name in ordered}


def label_ids(labels: Sequence[str]) -> dict[str, int]:
    """Each label's id."""
    return {name: number for number, name in enumerate(labels)}


def find_label(name: str, ids: Mapping[str, int], row: int) -> int:
    """The label's id. Raises ``DataError`` for one that the training rows do not have."""
    if name not in ids:
        known = ", ".join([*list(ids)[:_SHOWN], *(["…"] if len(ids) > _SHOWN else [])])
        raise DataError(
            f"row {row}: label {name!r} stands in no training row (they have {known}); leave the "
            "row out, or train on rows that have it"
        )
    return ids[name]
