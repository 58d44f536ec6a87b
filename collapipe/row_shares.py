"""How devices that share a segment divide a micro-batch's rows, and who leads each block."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def leaders(rows: Sequence[int], blocks: int) -> list[int]:
    """Return the number of the device that leads each of a segment's ``blocks``: devices lead in
    proportion to their ``rows`` (D'Hondt's method), because rows and steps take time of the same
    processor."""
    found, led = list[int](), [0] * len(rows)
    for _ in range(blocks):
        number = min(range(len(rows)), key=lambda each: (led[each] + 1) / rows[each])
        led[number] += 1
        found.append(number)
    return found


def row_ends(planned: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return where each share of a micro-batch of ``rows`` rows ends: in proportion to the
    ``planned`` rows, rounded down."""
    ends = list(accumulate(planned))
    return tuple(rows * end // ends[-1] for end in ends)


def common_rows(
    rows: Sequence[int], place: int, others: Sequence[int], total: int
) -> list[tuple[int, int]]:
    """Return the range of rows that a device has in common with each device of another stage,
    counted from its own first row, of a micro-batch of ``total`` rows.

    ``rows`` are the planned rows of the devices of its stage, of which it is number ``place``;
    ``others`` are those of the other stage's devices.
    """
    ends = (0, *row_ends(rows, total))
    first, stop = ends[place], ends[place + 1]
    within = (min(max(end, first), stop) - first for end in (0, *row_ends(others, total)))
    return list(pairwise(within))


def connected(rows: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """Return the numbers of each two devices of two stages that have rows in common, of
    micro-batches of any size. ``rows`` and ``others`` are the devices' planned rows."""
    total = sum(rows) * sum(others)  # of which each device has whole rows
    return [
        (place, other)
        for place in range(len(rows))
        for other, (first, end) in enumerate(common_rows(rows, place, others, total))
        if end > first
    ]
