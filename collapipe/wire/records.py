"""Plans, reports and weights ↔ Flower records. The only file that knows a record's keys."""

import io
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.lib.format as npy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import CollaPipeError, WireError, one_line
from collapipe.report import ClusterReport
from collapipe.state import ClusterState
from collapipe.tensors import Tensors, all_finite
from collapipe.wire.messages import (
    Failure,
    Setup,
    StateReply,
    TrainReply,
    TrainRequest,
)

T = TypeVar("T")
STATE = "query.state"  # message types, as Flower addresses them
FROZEN = "query.frozen"
KEEP = "query.keep"
RESTORE = "query.restore"
TRAIN = "train"
_HEADER = re.compile(  # what numpy and we write for numbers in C order
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<dtype>[<|][biuf]\d)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n",
    re.DOTALL,
)

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {  # kept, for each costs a millisecond
    kind: TypeAdapter(kind) for kind in (ClusterState, ClusterReport, Setup, TrainRequest)
}


def pack_state_request(setup: Setup) -> RecordDict:
    """Ask for a cluster's state; the unit keeps the setup."""
    return RecordDict({"setup": ConfigRecord({"setup": _json(setup)})})


def unpack_state_request(content: RecordDict) -> Setup:
    """Raises ``WireError``, as all that unpack do."""
    return _parse(Setup, _value(content, "setup", "setup"))


def pack_state(state: ClusterState, lacking: Sequence[str]) -> RecordDict:
    """A cluster's state, and the frozen parts that the unit has not."""
    values = ConfigRecord({"unit": state.unit, "state": _json(state), "lacking": [*lacking]})
    return RecordDict({"state": values})


def unpack_state(content: RecordDict) -> StateReply | Failure:
    if failure := _failure(content):
        return failure
    unit, lacking = (_value(content, "state", key) for key in ("unit", "lacking"))
    if not isinstance(unit, int) or not isinstance(lacking, list):
        raise WireError("state.unit must be a whole number and state.lacking a list of parts")
    state = _cluster_state(unit, _value(content, "state", "state"))
    return StateReply(unit, state, tuple(str(part) for part in lacking))


def pack_groups(groups: Mapping[str, Tensors]) -> RecordDict:
    """Named groups of tensors, be it none: frozen parts, what a unit keeps, or just an answer."""
    arrays = {name: pack_tensors(tensors) for name, tensors in groups.items()}
    return RecordDict({"message": ConfigRecord(), **arrays})


def unpack_groups(content: RecordDict) -> dict[str, Tensors] | Failure:
    groups = {name: unpack_tensors(record) for name, record in content.array_records.items()}
    return _failure(content) or groups


def pack_request(request: TrainRequest, weights: ArrayRecord) -> RecordDict:
    """A ``train`` message's content; ``weights`` can be shared by many."""
    config = ConfigRecord({"request": _json(request)})
    return RecordDict({"weights": weights, "request": config})


def unpack_request(content: RecordDict) -> tuple[TrainRequest, Tensors]:
    request = _parse(TrainRequest, _value(content, "request", "request"))
    return request, unpack_record(content, "weights")


def pack_reply(reply: TrainReply) -> RecordDict:
    """A unit's answer to a ``train`` message."""
    values = ConfigRecord({"report": _json(reply.report), "state": _json(reply.state)})
    return RecordDict({"weights": pack_tensors(reply.weights), "report": values})


def unpack_reply(content: RecordDict) -> TrainReply | Failure:
    if failure := _failure(content):
        return failure
    report = _parse(ClusterReport, _value(content, "report", "report"))
    state = _cluster_state(report.unit, _value(content, "report", "state"))
    return TrainReply(unpack_record(content, "weights"), report, state)


def pack_failure(error: Exception) -> RecordDict:
    """The answer of a unit that could not finish."""
    config = ConfigRecord({"kind": type(error).__name__, "message": str(error)})
    return RecordDict({"failure": config})


def _failure(content: RecordDict) -> Failure | None:
    if "failure" not in content:
        return None
    kind, message = (str(_value(content, "failure", key)) for key in ("kind", "message"))
    return Failure(kind, message)


def pack_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record of arrays."""
    return ArrayRecord(OrderedDict((name, _array(tensor)) for name, tensor in tensors.items()))


def _array(tensor: Tensor) -> Array:
    """As Flower makes one of numpy's format, but copied once instead of three times."""
    values = tensor.numpy()
    head = io.BytesIO()
    what = {"descr": npy.dtype_to_descr(values.dtype), "fortran_order": False}
    npy.write_array_header_1_0(head, {**what, "shape": values.shape})
    data = b"".join((head.getvalue(), np.ascontiguousarray(values).reshape(-1).data))
    return Array(str(values.dtype), tuple(tensor.shape), SType.NUMPY, data)


def unpack_record(content: RecordDict, key: str) -> Tensors:
    """The named tensors of a record in a message. Raises ``WireError``."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"message without arrays {key!r}; has {sorted(content)}")
    return unpack_tensors(record)


def unpack_tensors(record: ArrayRecord) -> Tensors:
    """Named tensors, each with memory of its own. Raises ``WireError``."""
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    """An array's tensor, once its header claims no more than came with it."""
    try:
        dtype, shape, begin = _header(array.data)
        claimed, came = math.prod(shape) * dtype.itemsize, len(array.data) - begin
        if claimed != came:
            raise ValueError(f"{came} bytes for {dtype} {list(shape)}")
        values = np.frombuffer(array.data, dtype, offset=begin)
        return torch.from_numpy(values.reshape(shape).copy())
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"array {name} cannot be read: {one_line(error)}") from error


def _header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Type, shape, and where the values begin. Raises ``ValueError``.

    Not by numpy, which has Python parse the header: in programs with threads that fails now and
    then, with "AST constructor recursion depth mismatch" (python/cpython issue 106905).
    """
    found = _HEADER.match(data)
    if found is None or found.end() != 10 + int.from_bytes(found["length"], "little"):
        raise ValueError("no header of numpy's format 1.0 with values in C order")
    shape = tuple(int(size) for size in found["shape"].split(b",") if size.strip())
    return np.dtype(found["dtype"].decode()), shape, found.end()


def select_arrays(record: ArrayRecord, names: Collection[str]) -> ArrayRecord:
    """The arrays of these names; nothing is copied."""
    return ArrayRecord(OrderedDict((name, record[name]) for name in record if name in names))


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Payload of tensors on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_like(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], sender: str) -> None:
    """Raise ``WireError`` unless names, shapes and dtypes are those expected, all values finite."""
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())
        raise WireError(f"{sender} sent other weights than asked for: {', '.join(odd[:3])} …")
    for name, tensor in tensors.items():
        like = expected[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise WireError(
                f"{sender} sent {name} as {tensor.dtype} {list(tensor.shape)}, "
                f"expected {like.dtype} {list(like.shape)}"
            )
        if not all_finite(tensor):
            raise WireError(f"{sender} sent {name} with values that are NaN or infinite")


def _cluster_state(unit: int, text: Any) -> ClusterState | Failure:
    """The state of ``unit``, or why its text is none: that excludes the unit from rounds only."""
    try:
        state = _parse(ClusterState, text)
    except WireError as error:
        return Failure(type(error).__name__, one_line(error))
    if state.unit != unit:
        return Failure("WireError", f"sent the state of unit {state.unit}, expected {unit}")
    return state


def _json(value: object) -> str:
    return _ADAPTERS[type(value)].dump_json(value).decode()


def _parse(kind: type[T], text: Any) -> T:
    try:
        return cast(T, _ADAPTERS[kind].validate_json(text))
    except CollaPipeError as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireError(f"not a {kind.__name__}: {place}: {first['msg']}") from error


def _value(content: RecordDict, record: str, key: str) -> Any:
    config = content.get(record)
    if not isinstance(config, ConfigRecord) or key not in config:
        raise WireError(f"message without {record}.{key}; has {sorted(content)}")
    return config[key]
