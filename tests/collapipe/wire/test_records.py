"""What comes in a message is checked before it is believed."""

import io
import json
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from collapipe.errors import WireError
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.report import ClusterReport
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, EnergyBudget, Uplink
from collapipe.wire import records
from collapipe.wire.compression import FLOAT32, restore
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
TENSORS = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor(3.5, dtype=torch.float64)}


@pytest.mark.parametrize(
    "link", [None, LinkAddress("127.0.0.1:1", b"pem", "a", b"key", b"own", "secret")]
)
def test_a_request_comes_as_it_went(link: LinkAddress | None) -> None:
    request = TrainRequest(7, PLAN, 30.0, link)
    content = records.pack(request, weights=records.pack_tensors(TENSORS))
    assert records.unpack(TrainRequest, content) == request
    weights = records.unpack_record(content, "weights")
    assert all(torch.equal(weights[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12)[::5],
        torch.ones(2, 2, dtype=torch.bool),
    ],
)
def test_an_array_is_read_as_flower_reads_it(tensor: torch.Tensor) -> None:
    record = records.pack_tensors({"x": tensor})
    assert record["x"].numpy().tolist() == tensor.tolist()
    assert record["x"].shape == tuple(tensor.shape)
    assert records.unpack_tensors(record)["x"].equal(tensor)


def test_a_reply_a_failure_and_a_state_come_as_they_went() -> None:
    report = ClusterReport(1, (2.5, 1.5), 12, 99, {"forward": 0.5}, 10, 20)
    state = ClusterState(1, (DEVICE,), 5, Uplink(0.5, 10.0, 1e6, 2e6, (0.9, 0.8)))
    reply = records.unpack_reply(records.pack_reply(TrainReply(TENSORS, report, state)))
    assert (reply.report, reply.state) == (report, state)
    failure = Failure("ValueError", "no")
    assert records.unpack(Failure, records.pack(failure)) == failure
    told = records.unpack_state(records.pack_state(state, ["blocks.1"]))
    assert told == StateReply(1, state, ("blocks.1",))
    setup = Setup("words", {"blocks.1": "ab"})
    assert records.unpack(Setup, records.pack(setup)) == setup
    parts = records.unpack_groups(records.pack_groups({"blocks.1": TENSORS}))
    assert list(parts) == ["blocks.1"]
    assert all(torch.equal(parts["blocks.1"][name], value) for name, value in TENSORS.items())


def record(data: bytes) -> ArrayRecord:
    return ArrayRecord(OrderedDict(x=Array("float32", (2,), "numpy.ndarray", data)))


def header(dtype: str, shape: str) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    padding = b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text + padding).to_bytes(2, "little") + text + padding


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        header("<f4", "(100000000000000,)") + bytes(8),
        header("<f4", "(2,)") + bytes(7),
        header("<f4", "(2,)") + bytes(9),
        header("<f4", "(-1,)") + bytes(8),
        header("|O", "(1,)") + bytes(8),
        header("<U2", "(1,)") + bytes(8),
        b"\x93NUMPY\x02\x00" + bytes(50),
        b"\x93NUMPY\x01\x00\x03\x00'''",
        header("<f4", "(" * 3000),
        header("<f4", "(2, 1)").replace(b"False", b"True ") + bytes(8),
    ],
)
def test_arrays_that_claim_what_did_not_come_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="array x cannot be read"):
        records.unpack_tensors(record(data))


def test_what_was_claimed_and_what_came_are_named() -> None:
    with pytest.raises(WireError, match=r"8 bytes for float32 \[100000000000000\]"):
        records.unpack_tensors(record(header("<f4", "(100000000000000,)") + bytes(8)))


def test_a_header_of_another_length_than_it_says_is_refused() -> None:
    sound = header("<f4", "(2,)") + bytes(8)
    assert records.unpack_tensors(record(sound))["x"].tolist() == [0.0, 0.0]
    for length in (0, len(sound) - 19, len(sound) - 17):
        with pytest.raises(WireError, match="no header of numpy's format"):
            records.unpack_tensors(record(sound[:8] + length.to_bytes(2, "little") + sound[10:]))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_array_or_refused(data: bytes) -> None:
    try:
        records.unpack_tensors(record(header("<f4", "(2,)")[:10] + data))
    except WireError:
        return


def test_flowers_own_arrays_are_read() -> None:
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    read = records.unpack_tensors(ArrayRecord(OrderedDict(x=Array(array))))
    assert torch.equal(read["x"], torch.from_numpy(array))


@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0)))
def test_arrays_are_read_as_numpy_reads_them_or_refused(values: NDArray[Any]) -> None:
    kept = io.BytesIO()
    np.save(kept, values, allow_pickle=False)
    if values.dtype.kind not in "biuf" or values.dtype.byteorder == ">" or not _of_torch(values):
        with pytest.raises(WireError):
            records.unpack_tensors(record(kept.getvalue()))
    else:
        read = records.unpack_tensors(record(kept.getvalue()))["x"].numpy()
        np.testing.assert_array_equal(read, values, strict=True)


def _of_torch(values: NDArray[Any]) -> bool:
    try:
        torch.from_numpy(values)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("report", ["", "[1]", "{}", '{"unit": "x"}', '{"unit": 1, "losses": 3}'])
def test_a_report_that_is_none_is_refused(report: str) -> None:
    text = f'{{"unit": 1, "state": "", "report": {report}}}'
    weights = records.pack_tensors(TENSORS)
    content = RecordDict({"UnitReply": ConfigRecord({"json": text}), "weights": weights})
    with pytest.raises(WireError, match="not a UnitReply: "):
        records.unpack_reply(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("x"), "other weights"),
        (lambda t: t.update(z=t["x"]), "other weights"),
        (lambda t: t.update(x=t["x"][:1]), "expected torch.float32 \\[2, 3\\]"),
        (lambda t: t.update(x=t["x"].double()), "sent x as torch.float64"),
        (lambda t: t.update(x=t["x"] / 0), "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: object, says: str) -> None:
    sent = dict(TENSORS)
    change(sent)  # type: ignore[operator]
    with pytest.raises(WireError, match=says):
        restore(sent, TENSORS, FLOAT32, "unit 1")


def change(content: RecordDict, before: str, after: str) -> None:
    """In the text that a unit sent."""
    text = str(content["UnitReply"]["json"])
    if before not in text:  # in the state, a text of its own
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
def test_a_state_that_cannot_be_is_set_aside(before: str, after: str) -> None:
    state = ClusterState(1, (DEVICE,), 5, Uplink(0.5, 10.0, 1e6, 2e6, (0.9, 0.8)))
    content = records.pack_state(state, [])
    change(content, before, after)
    told = records.unpack_state(content)
    assert told.unit == 1
    assert isinstance(told.state, Failure)
    assert told.state.message.startswith("not a ClusterState: ")


def test_a_state_is_the_units_own() -> None:
    content = records.pack_state(ClusterState(1, (DEVICE,), 5), [])
    change(content, '"unit":1', '"unit":0')
    told = records.unpack_state(content)
    assert told.state == Failure("WireError", "sent the state of unit 1, expected 0")


@pytest.mark.parametrize("lacking", ["3.0", '"blocks.1"', "true", "[1]"])
def test_what_is_lacking_is_a_list(lacking: str) -> None:
    content = records.pack_state(ClusterState(1, (DEVICE,), 5), [])
    change(content, '"lacking":[]', f'"lacking":{lacking}')
    with pytest.raises(WireError, match="lacking"):
        records.unpack_state(content)


SOUND = RowsReply(1, 9, {"a": 4}, {"\u0120hen": 3}, "berlin")


def test_what_a_unit_tells_of_its_rows_comes_back() -> None:
    assert records.unpack(RowsReply, records.pack(SOUND)) == SOUND


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"num_rows": 0}, "num_rows"),
        ({"num_rows": 2**60}, "num_rows"),
        ({"labels": {"a\x1b[2J": 1}}, "labels must be printable"),
        ({"labels": {"": 1}}, "labels must be printable"),
        ({"labels": {"a" * 201: 1}}, "1 to 200 letters"),
        ({"labels": {"a": 0}}, "labels"),
        ({"labels": {"a": "many"}}, "labels"),
        ({"labels": {str(n): 1 for n in range(10_001)}}, "10,001 labels"),
        ({"words": {"a hen": 1}}, "letters that stand for bytes"),
        ({"words": {"a" * 70_000: 1}}, "1 to 65536 letters"),
        ({"words": {"a": 2**27, "b": 1}}, "134,217,729 in all"),
        ({"name": "a\nb"}, "name must be printable"),
        ({"name": "a" * 65}, "name"),
    ],
)
def test_what_no_unit_can_tell_of_its_rows_is_refused(told: dict[str, Any], words: str) -> None:
    """It would be printed, drawn, or counted for hours."""
    text = json.dumps(asdict(SOUND) | told)
    content = RecordDict({"RowsReply": ConfigRecord({"json": text})})
    with pytest.raises(WireError, match=words):
        records.unpack(RowsReply, content)
