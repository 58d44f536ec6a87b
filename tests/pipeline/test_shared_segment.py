"""A segment that several devices share has the loss and gradients of one device."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_cluster import ragged
from torch import Tensor

from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey, dropout
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from collapipe.row_shares import row_ends
from pipeline.schedule import SCHEDULES
from pipeline.segment import Gradients, SharedSegment, added
from tests.pipeline.test_engine import (
    KEY,
    NUM_BLOCKS,
    Cluster,
    assert_same_bits,
    cluster,
    fresh,
    gradients,
    plan_of,
    transformer,
)

SPEC = transformer(dropout=0.3)


def shared(span: Span, *rows: int) -> SegmentPlan:
    """A segment with one device for each number in ``rows``."""
    shares = tuple(Share(f"device-{span.first}-{place}", own) for place, own in enumerate(rows))
    return SegmentPlan(shares[0].device, span, shares if len(shares) > 1 else ())


def plan(*segments: SegmentPlan, m: int = 2, schedule: str = "one_f_one_b") -> ClusterPlan:
    """A cluster plan with ``m`` micro-batches."""
    return ClusterPlan(KEY.unit, segments, m, schedule)


WHOLE = shared(Span(0, NUM_BLOCKS), 2, 1)
MIXED = shared(Span(0, 1), 1), shared(Span(1, 2), 1, 1, 1), shared(Span(3, 1), 2, 1)


def trained(plan: ClusterPlan, steps: Sequence[int] = (0, 1), recompute: bool = False) -> Cluster:
    """A cluster after a few clipped steps."""
    start = fresh(SPEC, torch.float32).state_dict()
    done = cluster(plan, SPEC, start, recompute=recompute)
    done.train(ragged(), steps, clip_norm=0.1)
    return done


@pytest.mark.parametrize("segments", [(WHOLE,), MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_sharing_does_not_change_the_loss_or_gradients(
    segments: Sequence[SegmentPlan], m: int
) -> None:
    """Without dropout, because each share draws its own masks. With m = 5, a micro-batch has one
    row, and most shares have no row."""
    spec = transformer(dropout=0.0)
    weights = fresh(spec, torch.float64).state_dict()
    alone = cluster(plan_of((NUM_BLOCKS,), m, "one_f_one_b"), spec, weights)
    loss = alone.pipeline.run(ragged(), KEY)
    together = cluster(plan(*segments, m=m), spec, weights)
    assert together.pipeline.run(ragged(), KEY) == pytest.approx(loss, rel=0, abs=1e-12)
    for name, gradient in gradients(together.model).items():
        expected = gradients(alone.model)[name]
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12, msg=name)


def test_bits_depend_only_on_the_shares() -> None:
    """The schedule, recomputing and a cut between equally shared blocks do not change the bits."""
    expected = trained(plan(WHOLE, schedule="gpipe")).weights()
    halves = shared(Span(0, 1), 2, 1), shared(Span(1, NUM_BLOCKS - 1), 2, 1)
    for schedule in SCHEDULES:
        assert_same_bits(expected, trained(plan(*halves, schedule=schedule)).weights())
    assert_same_bits(expected, trained(plan(WHOLE), recompute=True).weights())
    by_plan = plan(replace(WHOLE, recomputing=WHOLE.devices[1:]))
    assert_same_bits(expected, trained(by_plan).weights())
    other = trained(plan(shared(Span(0, NUM_BLOCKS), 1, 1))).weights()
    assert any(not torch.equal(expected[name], other[name]) for name in expected)


def test_an_aborted_step_does_not_change_later_steps() -> None:
    start = fresh(SPEC, torch.float32).state_dict()
    interrupted = cluster(plan(*MIXED), SPEC, start)
    interrupted.pipeline.run(ragged(), KEY)  # without a step
    for segment in interrupted.segments:
        segment.forget()
    interrupted.pipeline._first.forget()
    interrupted.head.forget_gradients()
    interrupted.train(ragged(), (0, 1), clip_norm=0.1)
    assert_same_bits(interrupted.weights(), trained(plan(*MIXED)).weights())


def test_frozen_first_blocks_return_no_gradient() -> None:
    """Blocks before the first trained block send no gradient back."""
    start = fresh(SPEC, torch.float32).state_dict()
    made = cluster(plan(*MIXED), SPEC, start)
    segment = made.segments[1]
    for part in (*segment.parts, *made.segments[0].parts):
        part.module.requires_grad_(False)
    hidden, mask = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    segment.forward(0, hidden, KEY, mask)
    assert segment.backward(0) is None


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 100])
def test_rows_are_divided_in_proportion_to_the_shares(rows: int) -> None:
    """Each row belongs to one share; a full micro-batch has exactly the planned rows."""
    segment = shared(Span(0, 1), 3, 1, 2)
    ends = row_ends(segment.rows, rows)
    assert ends[-1] == rows and list(ends) == sorted(ends)
    if rows == 6:
        assert ends == (3, 4, 6)


def test_a_segment_of_one_device_has_all_rows() -> None:
    segment = shared(Span(0, 1), 4)
    assert row_ends(segment.rows, 9) == (9,)
    assert segment.devices == ("device-0-0",)


@pytest.mark.parametrize(
    "shares",
    [
        (Share("a", 1),),
        (Share("b", 1), Share("a", 1)),
        (Share("a", 1), Share("b", 1), Share("a", 1)),
        (Share("a", 1), Share("b", 0)),
    ],
)
def test_impossible_shares_are_refused(shares: tuple[Share, ...]) -> None:
    with pytest.raises(ConfigError, match="expected two or more, "):
        SegmentPlan("a", Span(0, 1), shares)


def test_each_share_has_its_own_dropout_masks() -> None:
    """So a device draws masks only for its own rows."""
    ones, key = torch.ones(4, 8), DropoutKey(1, 0, 2)
    masks = []
    for share in (None, 0, 1, 0):
        with replace(key, share=share).drawing("blocks.0", 1):
            masks.append(dropout(ones, 0.5))
    assert torch.equal(masks[1], masks[3])
    assert len({tuple(each.flatten().tolist()) for each in masks}) == 3


def test_gradients_of_shares_are_added_in_order() -> None:
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    sums: list[list[Tensor | None]] = added([[a, None, None]], [[b, b, None]])
    assert sums == [[a + b, b, None]]
    assert added([], [[a]]) == added([[a]], []) == [[a]]


class _OnePart:
    """A part with the gradient of one weight."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = [None]

    def swap_gradients(self, other: list[Tensor | None]) -> list[Tensor | None]:
        own, self.gradients = self.gradients, other or [None]
        return own


@pytest.mark.parametrize("shares", [2, 3, 5])
def test_gradients_of_shares_are_added_one_part_at_a_time(
    shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans only include memory for one set of gradients per share."""
    parts: Any = [_OnePart() for _ in range(4)]
    segment, alive = SharedSegment([1] * shares, parts, False, False), list[weakref.ref[Tensor]]()

    def gradient(value: float) -> Tensor:
        made = torch.tensor([value])
        alive.append(weakref.ref(made))
        return made

    for share in range(shares):
        segment.gradients[share] = [[gradient(10.0**share)] for _ in parts]
    most = 0

    def counted(left: Gradients, right: Gradients) -> Gradients:
        nonlocal most
        sums = added(left, right)
        alive.extend(weakref.ref(each) for part in sums for each in part if each is not None)
        most = max(most, sum(each() is not None for each in {id(r()): r for r in alive}.values()))
        return sums

    monkeypatch.setattr("pipeline.segment.added", counted)
    segment.add_up()
    assert [each.gradients[0].item() for each in parts] == [float("1" * shares)] * 4
    assert most <= 4 * shares + 2  # an addition needs two summands and a sum
