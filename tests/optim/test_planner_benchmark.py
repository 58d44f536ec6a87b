"""The planner's benchmarks run on small rounds, and compare what they say they do."""

import pytest

from benchmarks.planner_round import rows
from benchmarks.planner_streamed import streamed


def test_nothing_in_the_table_of_rounds_is_below_ours() -> None:
    """A scan under drift ``gamma`` is exact, too."""
    found = {row.name: row for row in rows(1, 3, 2)}
    for name, row in found.items():
        world, _, _ = name.partition(": ")
        (ours,), (objective,) = found[f"{world}: ours"].objectives, row.objectives
        assert objective >= ours * (1 - 1e-9)
        if name.endswith("scan") and world.startswith("gamma"):
            assert objective <= ours * (1 + 1e-9)


@pytest.mark.thorough
def test_each_law_and_drift_has_a_line_for_each_way_to_send() -> None:
    lines = [line.split()[:3] for line in streamed(1, 2, 2)]
    assert len(lines) == len({tuple(each) for each in lines}) == 16
