"""Plans, reports and weights ↔ Flower records. The only file that knows a record's keys."""

import io
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
import numpy.lib.format as npy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import CollaPipeError, WireError
from collapipe.messages import Failure, LinkAddress, TrainReply, TrainRequest
from collapipe.models.part import Tensors, all_finite
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterReport
from collapipe.state import ClusterState

T = TypeVar("T")
STATE = "query.state"  # message types, as Flower addresses them
TRAIN = "train"
# Kept, for an adapter costs a millisecond.
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (ClusterState, ClusterPlan, ClusterReport)
}


def pack_state_request(tokenizer: str) -> RecordDict:
    """Ask for a cluster's state, and give it the run's tokeniser."""
    return RecordDict({"setup": ConfigRecord({"tokenizer": tokenizer})})


def unpack_state_request(content: RecordDict) -> str:
    """The tokeniser's JSON."""
    return str(_value(content, "setup", "tokenizer"))


def pack_state(state: ClusterState) -> RecordDict:
    """A cluster's state."""
    return RecordDict({"state": ConfigRecord({"state": _json(state)})})


def unpack_state(content: RecordDict) -> ClusterState | Failure:
    """See ``pack_state`` and ``pack_failure``. Raises ``WireError``."""
    if "failure" in content:
        return _failure(content)
    return _parse(ClusterState, _value(content, "state", "state"))


def pack_request(request: TrainRequest, weights: ArrayRecord) -> RecordDict:
    """A ``train`` message's content; ``weights`` can be shared by many."""
    config: dict[str, Any] = {
        "round": request.round,
        "plan": _json(request.plan),
        "timeout_s": request.timeout_s,
    }
    records = RecordDict({"weights": weights, "round": ConfigRecord(config)})
    if request.link is not None:
        link = request.link
        records["link"] = ConfigRecord(
            {"address": link.address, "certificate": link.certificate, "token": link.token}
        )
    return records


def unpack_request(content: RecordDict) -> tuple[TrainRequest, Tensors]:
    """See ``pack_request``. Raises ``WireError``."""
    link = None
    if "link" in content:
        fields = [_value(content, "link", key) for key in ("address", "certificate", "token")]
        link = LinkAddress(*fields)
    request = TrainRequest(
        round=_value(content, "round", "round"),
        plan=_parse(ClusterPlan, _value(content, "round", "plan")),
        timeout_s=_value(content, "round", "timeout_s"),
        link=link,
    )
    return request, unpack_record(content, "weights")


def pack_reply(reply: TrainReply) -> RecordDict:
    """A unit's answer."""
    report = ConfigRecord({"report": _json(reply.report)})
    return RecordDict({"weights": pack_tensors(reply.weights), "report": report})


def unpack_reply(content: RecordDict) -> TrainReply | Failure:
    """See ``pack_reply`` and ``pack_failure``. Raises ``WireError``."""
    if "failure" in content:
        return _failure(content)
    report = _parse(ClusterReport, _value(content, "report", "report"))
    return TrainReply(unpack_record(content, "weights"), report)


def pack_failure(error: Exception) -> RecordDict:
    """The answer of a unit that could not finish."""
    config = ConfigRecord({"kind": type(error).__name__, "message": str(error)})
    return RecordDict({"failure": config})


def _failure(content: RecordDict) -> Failure:
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
    data = io.BytesIO(array.data)
    try:
        if npy.read_magic(data) != (1, 0):
            raise ValueError("another version of the format")
        shape, _, dtype = npy.read_array_header_1_0(data)
        claimed, came = math.prod(shape) * dtype.itemsize, len(array.data) - data.tell()
        if dtype.hasobject or claimed != came:
            raise ValueError(f"{came} bytes for {dtype} {list(shape)}")
        values = np.frombuffer(array.data, dtype, offset=data.tell())
        return torch.from_numpy(values.reshape(shape).copy())
    except (TypeError, ValueError, EOFError) as error:
        raise WireError(f"array {name} cannot be read: {error}") from error


def select_arrays(record: ArrayRecord, leave_out: str) -> ArrayRecord:
    """The arrays whose names do not begin with ``leave_out``; nothing is copied."""
    kept = {name: array for name, array in record.items() if not name.startswith(leave_out)}
    return ArrayRecord(OrderedDict(kept))


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


def _json(value: Any) -> str:
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
