"""The number of colluding units that a lying server needs, counted in another way."""

import pytest
from masked_sums import colluders_needed

from collapipe.secure_aggregation.session import units_needed


def two_lists(units: int, needed: int, colluding: int) -> bool:
    """Whether honest units split into two parts, each sufficient with the colluding units."""
    honest = units - colluding
    return any(
        min(part, honest - part) + colluding >= needed and 0 < part < honest
        for part in range(honest + 1)
    )


@pytest.mark.parametrize("threshold", [0.5 + 1e-10, 0.6, 2 / 3, 0.75, 0.9, 1.0])
def test_two_lists_are_confirmed_only_with_the_needed_colluding_units(
    threshold: float,
) -> None:
    for units in range(3, 61):
        needed = units_needed(units, threshold)
        found = colluders_needed(units, needed)
        assert not any(two_lists(units, needed, each) for each in range(found))
        assert two_lists(units, needed, found) or found == needed - 1
        assert found >= 1


def test_an_owners_least_units_bound_the_colluding_units_of_any_round() -> None:
    """The bound holds for any units and threshold that the server chooses."""
    for peers in range(3, 61):
        for least in range(2, peers + 1):
            found = min(
                colluders_needed(units, max(least, units_needed(units, 0.5)))
                for units in range(least, peers + 1)
            )
            assert found == max(1, min(2 * least - peers, least - 1))
        assert 3 * colluders_needed(peers, units_needed(peers, 2 / 3)) >= peers
