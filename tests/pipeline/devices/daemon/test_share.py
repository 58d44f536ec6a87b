"""Which parts a device accepts from the other devices of its segment."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collapipe.errors import WireError
from collapipe.models.description import describe
from collapipe.plan import Span
from collapipe.wire.parts import joined
from pipeline.devices.block_form import block_forms
from pipeline.devices.daemon.share import Exchange
from pipeline.devices.encoding import as_json, from_json
from pipeline.devices.messages import (
    BEFORE,
    BEHIND,
    SHARE,
    SegmentDescription,
    ShareHeader,
    neighbour_name,
    place_of,
)
from tests.device_cluster import ADAMW, SMALL

FORMS = block_forms(SMALL, range(2), ADAMW, torch.float32)
GRADIENTS, WEIGHTS = ShareHeader("gradients", 0), ShareHeader("weights", 0)


def description(**changes: Any) -> SegmentDescription:
    """A description for the second of two devices, which leads the second of two blocks."""
    fields: dict[str, Any] = {
        "version": "0",
        "unit": 0,
        "round": 1,
        "seed": 0,
        "model": describe(SMALL),
        "recompute": False,
        "dtype": "float32",
        "optimizer": ADAMW,
        "replicate_every": 1,
        "session": "s",
        "span": Span(0, 2),
        "stage": 0,
        "num_segments": 1,
        "num_micro_batches": 2,
        "schedule": "gpipe",
        "memory_bytes": 0.0,
        "base": -1,
        "shares": (2, 2),
        "cuts": (1, 2),
        "member": 1,
    }
    return SegmentDescription(**(fields | changes))


def trained(block: str, **changes: torch.Tensor) -> bytes:
    """The trained tensors of the block, as bytes."""
    own = {
        name: torch.zeros_like(FORMS[block].tensors[name], device="cpu")
        for name in FORMS[block].trained
    }
    return joined(own | changes).numpy().tobytes()


def test_a_step_is_complete_after_all_expected_parts() -> None:
    exchange = Exchange(description(), FORMS)
    assert [exchange.leads(name) for name in FORMS] == [False, True]
    assert not exchange.has_gradients(4) and not exchange.has_weights(4)
    exchange.take(0, GRADIENTS, 4, trained("blocks.1"), now=4)
    assert exchange.has_gradients(4) and not exchange.has_gradients(5)
    exchange.take(0, WEIGHTS, 4, trained("blocks.0"), now=4)
    assert exchange.has_weights(4)


@pytest.mark.parametrize(
    ("header", "block"),
    [
        (GRADIENTS, "blocks.0"),  # the other device leads it
        (replace(GRADIENTS, share=1), "blocks.1"),  # our own share
        (replace(GRADIENTS, share=9), "blocks.1"),
        (WEIGHTS, "blocks.1"),  # we lead it
        (replace(WEIGHTS, share=1), "blocks.0"),
    ],
)
def test_parts_of_a_wrong_block_or_share_are_refused(header: ShareHeader, block: str) -> None:
    with pytest.raises(WireError, match="expected"):
        Exchange(description(), FORMS).take(0, header, 4, trained(block), now=4)


def test_a_device_with_few_rows_may_lead_no_block() -> None:
    """It only sends gradients and receives weights."""
    exchange = Exchange(description(shares=(9, 1)), FORMS)
    assert not any(map(exchange.leads, FORMS)) and exchange.has_gradients(4)
    with pytest.raises(WireError, match="not expected"):
        exchange.take(0, GRADIENTS, 4, trained("blocks.1"), now=4)
    for left, block in ((1, "blocks.0"), (0, "blocks.1")):
        assert not exchange.has_weights(4)
        exchange.take(0, replace(WEIGHTS, left=left), 4, trained(block), now=4)
    assert exchange.has_weights(4)


def test_gradients_are_accepted_once_for_this_and_the_next_step() -> None:
    exchange = Exchange(description(), FORMS)
    exchange.take(0, GRADIENTS, 4, trained("blocks.1"), now=4)
    with pytest.raises(WireError, match="not expected"):
        exchange.take(0, GRADIENTS, 4, trained("blocks.1"), now=4)
    exchange.take(0, GRADIENTS, 5, trained("blocks.1"), now=4)
    for header, step in ((GRADIENTS, 6), (GRADIENTS, 3), (WEIGHTS, 5)):
        with pytest.raises(WireError, match="expected 4"):
            exchange.take(0, header, step, trained("blocks.1"), now=4)


def test_gradients_of_aborted_steps_are_freed() -> None:
    exchange = Exchange(description(), FORMS)
    for step in range(5):
        exchange.take(0, GRADIENTS, step, trained("blocks.1"), now=step)
        exchange.put_gradients(step, SimpleNamespace(gradients={}), [])  # type: ignore[arg-type]
    assert [*exchange._received] == [4] and not exchange._received[4]


def test_empty_parts_are_refused() -> None:
    with pytest.raises(WireError, match="not expected"):
        empty = joined({}).numpy().tobytes()
        Exchange(description(), FORMS).take(0, replace(GRADIENTS, left=1), 4, empty, now=4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        trained("blocks.0"),
        trained("blocks.1", extra=torch.zeros(1)),
        trained("blocks.1", **{next(iter(FORMS["blocks.1"].trained)): torch.zeros(1)}),
    ],
)
def test_tensors_that_the_block_does_not_have_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Exchange(description(), FORMS).take(0, GRADIENTS, 4, data, now=4)


def test_incomplete_weights_are_refused() -> None:
    with pytest.raises(WireError, match="weights without 'blocks"):
        empty = joined({}).numpy().tobytes()
        Exchange(description(), FORMS).take(0, WEIGHTS, 4, empty, now=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"cuts": (2, 1)},
        {"cuts": (1,)},
        {"cuts": (1, 3)},
        {"member": 2},
        {"shares": (0, 2)},
        {"shares": (1,) * 200, "cuts": tuple(range(1, 201))},
    ],
)
def test_impossible_descriptions_are_refused(changes: dict[str, Any]) -> None:
    known = from_json(SegmentDescription, as_json(description()))
    assert [known.shares_of(each) for each in range(2)] == [range(1), range(1, 2)]
    with pytest.raises(WireError):
        from_json(SegmentDescription, as_json(replace(known, **changes)))


def test_a_neighbour_name_contains_side_and_number() -> None:
    assert place_of(neighbour_name(SHARE, 7)) == (SHARE, 7)
    wrong = "before", "share-", "share-x", "share-9999", "share-²", "above-1"
    assert not any(map(place_of, wrong))


def test_neighbours_are_the_devices_with_rows_in_common() -> None:
    """A device with the second half of the rows, between a stage of three devices and one
    device."""
    own = description(rows_before=(1, 1, 2))
    assert own.neighbours == {"before-2", "share-0", "behind-0"}
    assert own.rows_with(BEFORE, 6) == [(0, 0), (0, 0), (0, 3)]
    assert description(rows_behind=(3, 1), member=0).rows_with(BEHIND, 8) == [(0, 4), (4, 4)]
