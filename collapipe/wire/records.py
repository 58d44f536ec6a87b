"""Plans, reports and weights ↔ Flower records. The only file that knows a record's keys."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import CollaPipeError, WireError, one_line
from collapipe.report import ClusterReport
from collapipe.secure_aggregation.messages import (
    KeysReply,
    KeysRequest,
    MaskRequest,
    Roster,
    SharesReply,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.unit import (
    LastMasked,
    MaskedUnit,
    UnitWithKeys,
    UnitWithShares,
    UnitWithSurvivors,
)
from collapipe.state import ClusterState
from collapipe.statistics import Statistics
from collapipe.tensors import Tensors
from collapipe.wire.kept_file import KeptFile
from collapipe.wire.messages import (
    EvaluateReply,
    EvaluateRequest,
    Failure,
    KeepRequest,
    RowsReply,
    RowsRequest,
    Setup,
    StateReply,
    Trained,
    TrainReply,
    TrainRequest,
    UnitName,
)
from collapipe.wire.parts import joined_bytes, separated

T = TypeVar("T")
ROWS = "query.rows"  # message types, as Flower addresses them
STATE = "query.state"
FROZEN = "query.frozen"
KEEP = "query.keep"
RESTORE = "query.restore"
TRAIN = "train"
EVALUATE = "evaluate"
MASK_KEYS = "query.mask_keys"
MASK_SHARES = "query.mask_shares"
SURVIVORS = "query.survivors"
UNMASK = "query.unmask"
MASKED = "masked"  # the one tensor of an upload that is masked
_STAGES = UnitWithKeys, UnitWithShares, MaskedUnit, UnitWithSurvivors
_taken = set[bytes]()  # digests of the stages that this process has taken
# What a unit's state has that its last round did not leave there.
OF_NO_ROUND = tuple(kind.__name__ for kind in (Setup, LastMasked, *_STAGES))
# JSON of a reply without its steps: a state of 128 devices and 20,000 channels, and events.
REPLY_BYTES = 2**20
WEIGHTS, HEAD_STATE, COUNTS = "weights", "head_state", "counts"  # arrays of replies
_MOST_PARTS = 64  # of an exact sum; more than 42 no sum of floats has
_JOINED = "safetensors"


def pack(message: object, **groups: ArrayRecord) -> RecordDict:
    """A message as JSON under the name of its class, and named tensors beside it."""
    config = ConfigRecord({"json": _json(message)})
    return RecordDict({type(message).__name__: config, **groups})


def unpack(kind: type[T], content: RecordDict) -> T:
    """The message of this class. Raises ``WireError``, as all that unpack do. Its size was checked
    before: parsing may take 60 times its memory."""
    config = content.get(kind.__name__)
    if not isinstance(config, ConfigRecord) or "json" not in config:
        raise WireError(f"message without {kind.__name__}; has {sorted(content)}")
    return _parse(kind, config["json"])


def pack_state(state: ClusterState, lacking: Sequence[str], name: str = "") -> RecordDict:
    """A cluster's state, the frozen parts that the unit has not, and its name."""
    return pack(UnitReply(state.unit, _json(state), lacking=tuple(lacking), name=name))


def unpack_state(content: RecordDict) -> StateReply:
    answer = unpack(UnitReply, content)
    return StateReply(answer.unit, _own_state(answer), answer.lacking, answer.name)


def pack_groups(groups: Mapping[str, Tensors]) -> RecordDict:
    """Named groups of tensors, be it none: frozen parts, what a unit keeps, or just an answer."""
    arrays = {name: pack_tensors(tensors) for name, tensors in groups.items()}
    return RecordDict({"message": ConfigRecord(), **arrays})


def unpack_groups(content: RecordDict) -> dict[str, Tensors]:
    return {name: unpack_tensors(record) for name, record in arrays_of(content).items()}


def arrays_of(content: RecordDict) -> dict[str, ArrayRecord]:
    """The message's array records. Flower's ``array_records`` refers back to the message, whose
    bytes then stay until Python looks for cycles."""
    return {name: each for name, each in content.items() if isinstance(each, ArrayRecord)}


def pack_kept(messages: Mapping[str, str], groups: Mapping[str, Tensors]) -> RecordDict:
    """What a unit keeps between messages: a run's setup and the like as JSON, and tensors."""
    texts = {name: ConfigRecord({"json": text}) for name, text in messages.items()}
    arrays = {name: pack_tensors(tensors) for name, tensors in groups.items()}
    return RecordDict({**texts, **arrays})


def unpack_kept(state: RecordDict) -> tuple[dict[str, str], dict[str, Tensors]]:
    secret = {kind.__name__ for kind in _STAGES}  # of one round, and never on a disk
    told = state.config_records.items()
    texts = {name: str(config["json"]) for name, config in told if name not in secret}
    return texts, unpack_groups(state)


def trained_round(state: RecordDict) -> int:
    """The last round that is in what a unit keeps; 0: none is."""
    return unpack(Trained, state).round if Trained.__name__ in state else 0


def arrived_round(content: RecordDict) -> int | None:
    """The last round of which the server says that it got the unit's answer; None: it does not."""
    if TrainRequest.__name__ in content:
        return unpack(TrainRequest, content).arrived
    return unpack(KeepRequest, content).arrived if KeepRequest.__name__ in content else None


def pack_reply(reply: TrainReply) -> RecordDict:
    """A unit's answer to a ``train`` message."""
    answer = UnitReply(reply.report.unit, _json(reply.state), reply.report)
    return pack(answer, weights=pack_tensors(reply.weights), **pack_head_state(reply.head_state))


def pack_head_state(tensors: Tensors) -> dict[str, ArrayRecord]:
    """What goes with the weights of a head that has trained; nothing for another."""
    return {HEAD_STATE: pack_tensors(tensors)} if tensors else {}


def unpack_head_state(content: RecordDict) -> Tensors:
    return unpack_record(content, HEAD_STATE) if HEAD_STATE in content else {}


def unpack_reply(content: RecordDict) -> TrainReply:
    answer = unpack(UnitReply, content)
    if answer.report is None or answer.report.unit != answer.unit:
        raise WireError("a reply without a report of the unit's own")
    weights, head_state = unpack_record(content, WEIGHTS), unpack_head_state(content)
    return TrainReply(weights, answer.report, _own_state(answer), head_state)


def pack_evaluation(reply: EvaluateReply) -> RecordDict:
    """A unit's answer to an ``evaluate`` message."""
    if (found := reply.statistics) is None:
        return pack(EvaluationRecord(reply.unit))
    counts = pack_tensors({COUNTS: torch.from_numpy(found.counts)})
    return pack(EvaluationRecord(reply.unit, found.rows, found.tokens, found.losses), counts=counts)


def unpack_evaluation(content: RecordDict) -> EvaluateReply:
    told = unpack(EvaluationRecord, content)
    if not told.rows:
        return EvaluateReply(told.unit, None)
    counts = unpack_record(content, COUNTS).get(COUNTS)
    if counts is None or counts.dtype != torch.int64:
        raise WireError("an evaluation without counts that are whole numbers")
    return EvaluateReply(told.unit, Statistics(told.rows, told.tokens, told.losses, counts.numpy()))


def pack_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as one array, for Flower asks for each array of a message by itself."""
    data = joined_bytes(tensors)
    return ArrayRecord(OrderedDict({_JOINED: Array("uint8", (len(data),), _JOINED, data)}))


def unpack_record(content: RecordDict, key: str) -> Tensors:
    """The named tensors of a record in a message. Raises ``WireError``."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"message without arrays {key!r}; has {sorted(content)}")
    return unpack_tensors(record)


def unpack_tensors(record: ArrayRecord) -> Tensors:
    """Named tensors in their order, each with memory of its own. Raises ``WireError``."""
    if [*record] != [_JOINED]:
        raise WireError(f"arrays {sorted(record)[:5]} instead of one, {_JOINED!r}")
    return separated(record[_JOINED].data)


def keep_stage(
    stage: UnitWithKeys | UnitWithShares | MaskedUnit | UnitWithSurvivors, state: RecordDict
) -> None:
    """Let a unit's state have this stage of a masked sum, and no other."""
    for each in _STAGES:
        state.pop(each.__name__, None)
    state.update(pack(stage))


def take_stage(kind: type[T], state: RecordDict) -> T:
    """Remove the unit's stage of a masked sum from its state and return it.

    Raises ``WireError`` if the state has another stage, which is removed, too, or if this process
    has taken the stage before: an older state that comes back brings no stage back.
    """
    stages = {each.__name__: state.pop(each.__name__, None) for each in _STAGES}
    if (found := stages[kind.__name__]) is None:
        raise WireError(f"out-of-order message of a masked sum: the unit is not at {kind.__name__}")
    name = hashlib.sha256(str(found).encode()).digest()
    if name in _taken:
        raise WireError(f"{kind.__name__} was used before: a stage of a masked sum is used once")
    _taken.add(name)
    return unpack(kind, RecordDict({kind.__name__: found}))


def text_bytes(content: RecordDict) -> int:
    """Payload of a message's JSON."""
    return sum(len(str(config.get("json", ""))) for config in content.config_records.values())


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Payload of tensors on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def content_bytes(content: RecordDict) -> int:
    """Of all arrays in a message, as they travel."""
    arrays = arrays_of(content).values()
    return sum(len(array.data) for record in arrays for array in record.values())


@dataclass(frozen=True, slots=True)
class UnitReply:
    """What a unit sends; ``state`` is read apart from the rest, which may be valid without it."""

    unit: int
    state: Annotated[str, Field(max_length=REPLY_BYTES)]
    report: ClusterReport | None = None
    lacking: tuple[str, ...] = ()
    name: UnitName = ""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """``Statistics`` as they travel, without counts; no ``rows``: the unit has none."""

    unit: int
    rows: Annotated[int, Field(ge=0, lt=2**53)] = 0
    tokens: Annotated[int, Field(ge=0, lt=2**53)] = 0
    losses: Annotated[tuple[float, ...], Field(max_length=_MOST_PARTS)] = ()


def _own_state(answer: UnitReply) -> ClusterState | Failure:
    """The unit's state, or why what it sent is none: that excludes the unit from rounds only."""
    try:
        state = _parse(ClusterState, answer.state)
    except WireError as error:
        return Failure(type(error).__name__, one_line(error))
    if state.unit != answer.unit:
        cause = f"sent the state of unit {state.unit}, expected {answer.unit}"
        return Failure(WireError.__name__, cause)
    return state


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {  # kept, for each costs a millisecond
    kind: TypeAdapter(kind)
    for kind in (
        *(ClusterState, RowsRequest, RowsReply, Setup, TrainRequest, UnitReply, Failure),
        *(EvaluateRequest, EvaluationRecord, KeepRequest, Trained, KeptFile),
        *(KeysRequest, KeysReply, Roster, SharesReply, MaskRequest),
        *(SurvivorsRequest, SurvivorsReply, UnmaskRequest, UnmaskReply),
        *(*_STAGES, LastMasked),
    )
}


def _json(value: object) -> str:
    return _ADAPTERS[type(value)].dump_json(value).decode()


def _parse(kind: type[T], text: Any) -> T:
    try:
        return cast(T, _ADAPTERS[kind].validate_json(text))
    except CollaPipeError as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireError(f"not a {kind.__name__}: {place}: {first['msg']}") from error
