"""Shares of recovered tokens with their intervals, frequent tokens, and membership attacks."""

import numpy as np
import pytest
import torch

from collapipe.audit.membership import advantage, auc, membership
from collapipe.audit.recovery import frequent, share_of


@pytest.mark.parametrize(("share", "concentration"), [(0.5, 2.0), (0.9, 5.0), (0.97, 20.0)])
def test_the_interval_covers_the_true_share(share: float, concentration: float) -> None:
    """Rows differ (beta-binomial). About 95 of 100 intervals contain the true share."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(400):
        counts = draw.integers(5, 40, 60)
        rates = draw.beta(concentration * share, concentration * (1 - share), 60)
        found = share_of(torch.tensor(draw.binomial(counts, rates)), torch.tensor(counts))
        assert found is not None and 0 <= found.low <= found.value <= found.high <= 1
        covered += found.low <= share <= found.high
    assert 0.92 < covered / 400 < 0.98


def test_shares_of_exactly_0_and_1_have_intervals_of_positive_width() -> None:
    counts = torch.full((20,), 30)
    every, none = share_of(counts, counts), share_of(counts * 0, counts)
    assert every is not None and none is not None
    assert every.high == 1 and 0.8 < every.low < 0.9
    assert none.low == 0 and none.high == pytest.approx(1 - every.low)
    assert share_of(counts * 0, counts * 0) is None


def test_the_most_frequent_tokens_make_up_half() -> None:
    ids = torch.tensor([3] * 4 + [5] * 3 + [1, 2, 4])
    assert frequent(ids, 7).nonzero().flatten().tolist() == [3, 5]
    assert frequent(ids[:4], 7).nonzero().flatten().tolist() == [3]


def test_equal_losses_hide_membership_and_separate_losses_reveal_it() -> None:
    draw = np.random.default_rng(1)
    equal = membership(draw.random(300), draw.random(300), 0)
    assert equal.auc.low < 0.5 < equal.auc.high
    assert equal.advantage.low < 0 < equal.advantage.high
    apart = membership(draw.random(300), 2 + draw.random(300), 0)
    assert (apart.auc.low, apart.auc.value) == (1, 1)
    assert apart.advantage.value > 0.4  # the threshold is the members' mean


def test_the_area_under_the_curve_counts_ordered_pairs() -> None:
    draw = np.random.default_rng(2)
    members, others = draw.integers(0, 9, 17).astype(float), draw.integers(2, 12, 11).astype(float)
    pairs = members[:, None] - others
    assert auc(members, others) == pytest.approx(np.mean((pairs < 0) + 0.5 * (pairs == 0)))
    taken = [np.mean(rows <= members.mean()) for rows in (members, others)]
    assert advantage(members, others) == pytest.approx(taken[0] - taken[1])
