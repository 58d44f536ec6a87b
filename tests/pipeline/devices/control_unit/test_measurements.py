"""Times that devices report of a step are checked, summed and converted to one clock."""

import pytest
import torch
from device_cluster import plan_of
from torch import Tensor

from collapipe.errors import WireError
from pipeline.devices.control_unit.measurements import Clock, Measurements
from pipeline.devices.control_unit.own_times import OwnTimes
from pipeline.schedule import Action, build

TABLE = torch.tensor([[0.0, 1.0, 2.0, 2.25], [2.0, 2.5, 5.5, 6.0]], dtype=torch.float64)
USAGE = torch.tensor([100.0, 2000.0], dtype=torch.float64)
PLAN = plan_of(["here"], (3,))


def test_times_of_actions_are_summed() -> None:
    """A forward of 1 s and a backward of 3 s; their outputs are sent later."""
    measured = Measurements()
    for later_s in (0.0, 10.0):
        measured.add("here", 2, TABLE + later_s, USAGE)
    (report,) = measured.reports(PLAN, {})
    assert (report.name, report.blocks, report.chunk_s) == ("here", 3, 4.0)
    assert (report.compute_s, report.wait_s, report.span_s) == (8.0, 3.0, 12.0)
    assert report.send_s == 1.5
    assert report.send_alone_s == 1.0  # the forward's output is sent while the backward waits
    assert report.control_unit_wait_s == 3.0  # it has no neighbours
    assert (report.sent_bytes, report.peak_bytes) == (100.0, 2000.0)


def test_a_middle_device_waits_for_the_control_unit_while_it_computes() -> None:
    """By the control unit's clock, it embeds from second 1 to 3 and computes the head from 5 to
    9.5."""
    plan, names = plan_of(["first", "here", "last"], (1, 1, 1), 2), ("F0", "F1", "B0", "B1")
    first, second, *back = (Action(name[0], int(name[1])) for name in names)
    embedding = {first: (101.0, 102.0), second: (102.0, 103.0)}
    head = {first: (105.0, 105.5), second: (106.0, 106.25)}
    head |= {back[0]: (107.0, 107.5), back[1]: (109.0, 109.5)}
    table = torch.tensor(
        [
            [0.0, 3.0, 4.0, 4.0],  # from 1 to 3
            [4.0, 4.5, 5.0, 5.0],  # no overlap
            [5.0, 8.5, 9.0, 9.0],  # the whole wait
            [9.0, 10.0, 11.0, 11.0],  # to 9.5
        ],
        dtype=torch.float64,
    )
    assert build("gpipe", 3, 2)[1] == (first, second, *back)
    measured = Measurements()
    measured.add("here", 4, table, USAGE)
    measured.add_own(OwnTimes(embedding, head, 100.0, 112.0))
    for clocks, waits_s in (({"here": Clock(100.0, 0.25)}, 2.0 + 3.5 + 0.5), ({}, 0.0)):
        (report,) = measured.reports(plan, clocks)
        assert (report.wait_s, report.control_unit_wait_s) == (8.0, waits_s)


def test_traces_of_devices_use_one_clock() -> None:
    measured = Measurements()
    measured.add("here", 2, TABLE, USAGE)
    measured.add("here", 2, TABLE + 1.0, USAGE)
    (trace,) = measured.traces(PLAN, {"here": Clock(7.0, 0.25)})
    assert trace.error_s == 0.25
    first, second = (torch.tensor(step, dtype=torch.float64) for step in trace.steps)
    assert torch.allclose(second - first, torch.ones(2, 4).double())
    assert torch.allclose(first[:, 2] - first[:, 1], torch.tensor([1.0, 3.0]).double())


def test_traces_include_the_control_units_embedding_and_head() -> None:
    """The head receives the second micro-batch before it answers the first, and answers them in
    order."""
    plan, first, second = plan_of(["here"], (3,), 2), Action("F", 0), Action("F", 1)
    back = Action("B", 0), Action("B", 1)
    embedding = {first: (1.0, 2.0), second: (2.0, 4.0), back[0]: (9.0, 9.5), back[1]: (12.0, 13.0)}
    head = {first: (4.0, 4.5), second: (6.0, 6.5), back[0]: (8.0, 8.5), back[1]: (11.0, 11.5)}
    measured = Measurements()
    measured.add("here", 2, TABLE, USAGE)
    measured.add_own(OwnTimes(embedding, head, 0.0, 14.0))
    before, here, after = measured.traces(plan, {"here": Clock(0.0, 0.25)})
    assert [each.stage for each in (before, here, after)] == ["embedding", "segment", "head"]
    zero = before.steps[0][0][1] - 1.0

    def seconds(rows: tuple[tuple[float, ...], ...]) -> list[list[float]]:
        return [[round(each - zero, 6) for each in row] for row in rows]

    assert seconds(before.steps[0]) == [
        [1, 1, 2, 2],
        [2, 2, 4, 4],
        [8.5, 9, 9.5, 9.5],
        [11.5, 12, 13, 13],
    ]
    answers: dict[str, list[list[float]]] = {"F": [], "B": []}
    for action, row in zip(build("gpipe", 1, 2)[-1], seconds(after.steps[0]), strict=True):
        answers[action.kind].append(row[1:3])
    assert answers == {"F": [[4, 4.5], [6, 6.5]], "B": [[4.5, 8.5], [8.5, 11.5]]}


@pytest.mark.parametrize(
    ("table", "usage"),
    [
        (TABLE[:1], USAGE),
        (TABLE.float(), USAGE),
        (TABLE.flip(0), USAGE),
        (TABLE * torch.inf, USAGE),
        (TABLE + 1e10, USAGE),  # sums over a long round would be beyond a report's bounds
        (TABLE, USAGE[:1]),
        (TABLE, USAGE * 1e16),
        (TABLE, USAGE * torch.nan),
        (TABLE, USAGE.long()),
    ],
    ids=str,
)
def test_malformed_times_and_usage_are_refused(table: Tensor, usage: Tensor) -> None:
    measured = Measurements()
    with pytest.raises(WireError):
        measured.add("here", 2, table, usage)
    assert measured.reports(PLAN, {}) == []
