"""The content of a message is checked before it is used."""

import json
import tracemalloc
from collections import OrderedDict
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import WireError
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.report import ClusterReport, DeviceReport, DeviceTrace
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, EnergyBudget, Uplink
from collapipe.wire import records
from collapipe.wire.compression.codec import FLOAT32, restore
from collapipe.wire.messages import (
    Failure,
    LinkAddress,
    RowsReply,
    Setup,
    StateReply,
    TrainReply,
    TrainRequest,
)

PLAN = ClusterPlan(2, (SegmentPlan("a", Span(0, 1)), SegmentPlan("b", Span(1, 3))), 4, "gpipe")
DEVICE = DeviceProfile("a", AffineLaw(1, 2, 3, 4), 5, EnergyBudget(6, AffineLaw(7, 8, 9, 10)))
STATE = ClusterState(1, (DEVICE,), 5)
TENSORS = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor(3.5, dtype=torch.float64)}


@pytest.mark.parametrize(
    "link", [None, LinkAddress("127.0.0.1:1", b"pem", "a", b"key", b"own", "secret")]
)
def test_a_request_is_unpacked_unchanged(link: LinkAddress | None) -> None:
    request = TrainRequest(7, PLAN, 30.0, link)
    content = records.pack(request, weights=records.pack_tensors(TENSORS))
    assert records.unpack(TrainRequest, content) == request
    weights = records.unpack_record(content, "weights")
    assert all(torch.equal(weights[name], TENSORS[name]) for name in TENSORS)


def test_a_record_is_one_array_whose_tensors_keep_their_order() -> None:
    """Otherwise sums over the tensors would differ in the last digit from run to run."""
    tensors = {f"w{k % 10}{k}": torch.full((k % 3,), float(k)) for k in range(40)}
    record = records.pack_tensors(tensors)
    assert len(record) == 1
    assert list(records.unpack_tensors(record)) == list(tensors)


def test_a_record_holds_the_optimiser_state_of_the_deepest_models() -> None:
    """Three tensors for each of 12 weights in 512 blocks."""
    tensors = {f"blocks.{k}.self_attn.out_proj.exp_avg_sq": torch.zeros(1) for k in range(20_000)}
    state = records.pack_tensors(tensors)
    assert records.unpack_tensors(state).keys() == tensors.keys()


def test_replies_failures_and_states_are_unpacked_unchanged() -> None:
    report = ClusterReport(1, (2.5, 1.5), 12, 99, {"forward": 0.5}, 10, 20)
    state = ClusterState(1, (DEVICE,), 5, Uplink(0.5, 10.0, 1e6, 2e6, (0.9, 0.8)))
    reply = records.unpack_reply(records.pack_reply(TrainReply(TENSORS, report, state)))
    assert (reply.report, reply.state) == (report, state)
    failure = Failure("ValueError", "no")
    assert records.unpack(Failure, records.pack(failure)) == failure
    state_reply = records.unpack_state(records.pack_state(state, ["blocks.1"]))
    assert state_reply == StateReply(1, state, ("blocks.1",))
    setup = Setup("{}", "words", {"blocks.1": "ab"})
    assert records.unpack(Setup, records.pack(setup)) == setup
    parts = records.unpack_groups(records.pack_groups({"blocks.1": TENSORS}))
    assert list(parts) == ["blocks.1"]
    assert all(torch.equal(parts["blocks.1"][name], value) for name, value in TENSORS.items())


def record(data: bytes, name: str = "safetensors") -> ArrayRecord:
    return ArrayRecord(OrderedDict({name: Array("uint8", (len(data),), "safetensors", data)}))


def test_records_of_other_arrays_are_refused() -> None:
    with pytest.raises(WireError, match=r"arrays \['x'\] instead of one, 'safetensors'"):
        records.unpack_tensors(record(b"", "x"))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_tensors_or_refused(data: bytes, place: int) -> None:
    sound = records.pack_tensors(TENSORS)["safetensors"].data
    try:
        records.unpack_tensors(record(sound[:place] + data + sound[place + len(data) :]))
    except WireError:
        return


DEVICE_REPORT = DeviceReport("a", 1, 1.0, 1.0, 0.0, 0.0, 1.0, 8.0, 9.0)


@pytest.mark.parametrize(
    "changed",
    [
        *({each.name: 1e150} for each in fields(DeviceReport) if each.name[-2:] in ("_s", "es")),
        {"blocks": 10**30},
        {"blocks": 10**300},
    ],
    ids=repr,
)
def test_figures_of_devices_that_would_make_a_runs_files_unreadable_are_refused(
    changed: dict[str, Any],
) -> None:
    """A run's files have whole numbers below 1e30, and others below 1e150."""
    report = ClusterReport(1, (2.5,), 12, 99, devices=(replace(DEVICE_REPORT, **changed),))
    with pytest.raises(WireError, match=rf"report.devices\[0\].{min(changed)}: must be below"):
        records.unpack_reply(records.pack_reply(TrainReply(TENSORS, report, STATE)))


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1e308", "-1e308"])
def test_times_of_traces_that_cannot_be_drawn_are_refused(time: str) -> None:
    trace = DeviceTrace("a", 0.0, (((0.0, 1.0, 2.0, 3.0),),))
    report = ClusterReport(1, (2.5,), 12, 99, traces=(trace,))
    content = records.pack_reply(TrainReply(TENSORS, report, STATE))
    assert records.unpack_reply(content).report == report
    text = str(content["UnitReply"]["json"])
    content["UnitReply"] = ConfigRecord({"json": text.replace("3.0]", f"{time}]")})
    with pytest.raises(WireError, match=r"report.traces\[0\].steps"):
        records.unpack_reply(content)


@pytest.mark.parametrize("report", ["", "[1]", "{}", '{"unit": "x"}', '{"unit": 1, "losses": 3}'])
def test_an_invalid_report_is_refused(report: str) -> None:
    text = f'{{"unit": 1, "state": "", "report": {report}}}'
    weights = records.pack_tensors(TENSORS)
    content = RecordDict({"UnitReply": ConfigRecord({"json": text}), "weights": weights})
    with pytest.raises(WireError, match="not a UnitReply: "):
        records.unpack_reply(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("x"), "other weights"),
        (lambda t: t.update(z=t["x"]), "other weights"),
        (lambda t: t.update(x=t["x"][:1]), "expected torch.float32 \\[2, 3\\]"),
        (lambda t: t.update(x=t["x"].double()), "sent x as torch.float64"),
        (lambda t: t.update(x=t["x"] / 0), "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: object, message: str) -> None:
    sent = dict(TENSORS)
    change(sent)  # type: ignore[operator]
    with pytest.raises(WireError, match=message):
        restore(sent, TENSORS, FLOAT32, "unit 1")


def change(content: RecordDict, before: str, after: str) -> None:
    """Replace a part of the text that a unit sent."""
    text = str(content["UnitReply"]["json"])
    if before not in text:  # the text is in the state, a nested JSON text
        before, after = (json.dumps(each)[1:-1] for each in (before, after))
    assert before in text
    content["UnitReply"]["json"] = text.replace(before, after, 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"u":1.0', '"u":-1.0'),
        ('"u":1.0', '"u":NaN'),
        ('"limit_j":6.0', '"limit_j":Infinity'),
        ('"max_blocks":5', '"max_blocks":-5'),
        ('"name":"a"', '"nome":"a"'),
        ('"gains":[0.9,0.8]', '"gains":[0.9,-0.8]'),
        ('"devices":[', '"devices":[],"rest":['),
    ],
)
def test_an_invalid_state_is_unpacked_as_a_failure(before: str, after: str) -> None:
    state = ClusterState(1, (DEVICE,), 5, Uplink(0.5, 10.0, 1e6, 2e6, (0.9, 0.8)))
    content = records.pack_state(state, [])
    change(content, before, after)
    reply = records.unpack_state(content)
    assert reply.unit == 1
    assert isinstance(reply.state, Failure)
    assert reply.state.message.startswith("not a ClusterState: ")


def test_a_state_of_another_unit_is_unpacked_as_a_failure() -> None:
    content = records.pack_state(ClusterState(1, (DEVICE,), 5), [])
    change(content, '"unit":1', '"unit":0')
    reply = records.unpack_state(content)
    assert reply.state == Failure("WireError", "sent the state of unit 1, expected 0")


@pytest.mark.parametrize("lacking", ["3.0", '"blocks.1"', "true", "[1]"])
def test_the_lacking_parts_must_be_a_list(lacking: str) -> None:
    content = records.pack_state(ClusterState(1, (DEVICE,), 5), [])
    change(content, '"lacking":[]', f'"lacking":{lacking}')
    with pytest.raises(WireError, match="lacking"):
        records.unpack_state(content)


SOUND = RowsReply(1, 9, {"a": 4}, {"\u0120hen": 3}, "berlin")


def test_a_units_report_of_its_rows_is_unpacked_unchanged() -> None:
    assert records.unpack(RowsReply, records.pack(SOUND)) == SOUND


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_rows": 0}, "num_rows"),
        ({"num_rows": 2**60}, "num_rows"),
        ({"labels": {"a\x1b[2J": 1}}, "has a control character"),
        ({"labels": {"": 1}}, "1 to 200"),
        ({"labels": {"a" * 201: 1}}, "201 characters, a label has 1 to 200"),
        ({"labels": {"a": 0}}, "labels"),
        ({"labels": {"a": "many"}}, "labels"),
        ({"labels": {str(n): 1 for n in range(10_001)}}, "10,001 labels"),
        ({"words": {"a hen": 1}}, "letters of byte-level tokenisers"),
        ({"words": {"a" * 70_000: 1}}, "1 to 65536 letters"),
        ({"words": {"a": 2**27, "b": 1}}, "134,217,729 in all"),
        ({"words": {"a": 10**4000}}, "1 words, 10,000,000"),
        ({"name": "a\nb"}, "name must be printable"),
        ({"name": "a" * 65}, "name"),
    ],
)
def test_an_invalid_report_of_rows_is_refused(changed: dict[str, Any], words: str) -> None:
    """An unchecked report would be printed, drawn, or counted for hours."""
    text = json.dumps(asdict(SOUND) | changed)
    content = RecordDict({"RowsReply": ConfigRecord({"json": text})})
    with pytest.raises(WireError, match=words) as error:
        records.unpack(RowsReply, content)
    assert len(str(error.value)) < 500


def test_many_invalid_values_are_counted_and_not_read() -> None:
    """Each would take a kilobyte, and a report may have a million."""
    text = json.dumps(asdict(SOUND) | {"words": {str(number): 0 for number in range(20_000)}})
    content = RecordDict({"RowsReply": ConfigRecord({"json": text})})
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="20,000"):
            records.unpack(RowsReply, content)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
