"""Convert plans, reports and weights to Flower records and back. Only this file uses record keys.

All ``unpack`` functions raise ``WireError`` for an invalid message.
"""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from collapipe.errors import CollaPipeError, WireError, one_line
from collapipe.report import ClusterReport
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
from collapipe.validation import fault_of
from collapipe.wire.frozen_store import digest
from collapipe.wire.messages import (
    EvaluateReply,
    Failure,
    KeepRequest,
    RowsRequest,
    Setup,
    StateReply,
    Trained,
    TrainReply,
    TrainRequest,
    UnitName,
)
from collapipe.wire.parts import MODEL_HEADER_BYTES, pieces, separated

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
_taken = set[bytes]()  # digests of the stages that this process has used
# Entries of a unit's state that are not results of its last round.
OF_NO_ROUND = tuple(kind.__name__ for kind in (RowsRequest, Setup, LastMasked, *_STAGES))
# Bound of a reply's JSON without its steps: 128 devices, 20,000 channels and events fit.
REPLY_BYTES = 2**20
WEIGHTS, HEAD_STATE, COUNTS = "weights", "head_state", "counts"  # arrays of replies
_MOST_PARTS = 64  # floats of an exact sum, which never has more than 42
_JOINED = "safetensors"


def pack(message: object, **groups: ArrayRecord) -> RecordDict:
    """Return a message as JSON under its class name, together with named tensors."""
    config = ConfigRecord({"json": _json(message)})
    return RecordDict({type(message).__name__: config, **groups})


def unpack(kind: type[T], content: RecordDict) -> T:
    """Return the message of this class.

    The caller must check the message's size first: parsing may take 60 times its memory.
    """
    config = content.get(kind.__name__)
    if not isinstance(config, ConfigRecord) or "json" not in config:
        raise WireError(f"message without {kind.__name__}; has {sorted(content)}")
    return _parse(kind, config["json"])


def pack_state(state: ClusterState, lacking: Sequence[str], name: str = "") -> RecordDict:
    """Return a record of a cluster's state, the unit's name and the frozen parts that it lacks."""
    return pack(UnitReply(state.unit, _json(state), lacking=tuple(lacking), name=name))


def unpack_state(content: RecordDict) -> StateReply:
    answer = unpack(UnitReply, content)
    return StateReply(answer.unit, _own_state(answer), answer.lacking, answer.name)


def pack_groups(groups: Mapping[str, Tensors]) -> RecordDict:
    """Return a record of named groups of tensors. Without groups it is a bare acknowledgement."""
    arrays = {name: pack_tensors(tensors) for name, tensors in groups.items()}
    return RecordDict({"message": ConfigRecord(), **arrays})


def unpack_groups(content: RecordDict) -> dict[str, Tensors]:
    return {name: unpack_tensors(record) for name, record in arrays_of(content).items()}


def arrays_of(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the message's array records.

    Flower's own ``array_records`` makes a reference cycle: it keeps the message's bytes in memory
    until Python collects garbage.
    """
    return {name: each for name, each in content.items() if isinstance(each, ArrayRecord)}


def pack_kept(messages: Mapping[str, str], groups: Mapping[str, Tensors]) -> RecordDict:
    """Return a record of a unit's state between messages: texts as JSON, and tensors."""
    texts = {name: ConfigRecord({"json": text}) for name, text in messages.items()}
    arrays = {name: pack_tensors(tensors) for name, tensors in groups.items()}
    return RecordDict({**texts, **arrays})


def unpack_kept(state: RecordDict) -> tuple[dict[str, str], dict[str, Tensors]]:
    secret = {kind.__name__ for kind in _STAGES}  # for one round; never written to disk
    configs = state.config_records.items()
    texts = {name: str(config["json"]) for name, config in configs if name not in secret}
    return texts, unpack_groups(state)


def trained_round(state: RecordDict) -> int:
    """Return the last round that a unit's state includes; 0 if none."""
    return unpack(Trained, state).round if Trained.__name__ in state else 0


def arrived_round(content: RecordDict) -> int | None:
    """Return the last round whose reply the server received; None if the message lacks it."""
    if TrainRequest.__name__ in content:
        return unpack(TrainRequest, content).arrived
    return unpack(KeepRequest, content).arrived if KeepRequest.__name__ in content else None


def pack_reply(reply: TrainReply) -> RecordDict:
    """Return a unit's reply to a ``train`` message as a record."""
    answer = UnitReply(reply.report.unit, _json(reply.state), reply.report)
    return pack(answer, weights=pack_tensors(reply.weights), **pack_head_state(reply.head_state))


def pack_head_state(tensors: Tensors) -> dict[str, ArrayRecord]:
    """Return the optimiser state of a trained head as a record; empty without state."""
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
    """Return a unit's reply to an ``evaluate`` message as a record."""
    if (found := reply.statistics) is None:
        return pack(EvaluationRecord(reply.unit))
    counts = pack_tensors({COUNTS: torch.from_numpy(found.counts)})
    return pack(EvaluationRecord(reply.unit, found.rows, found.tokens, found.losses), counts=counts)


def unpack_evaluation(content: RecordDict) -> EvaluateReply:
    record = unpack(EvaluationRecord, content)
    if not record.rows:
        return EvaluateReply(record.unit, None)
    counts = unpack_record(content, COUNTS).get(COUNTS)
    if counts is None or counts.dtype != torch.int64:
        raise WireError("an evaluation without counts that are whole numbers")
    return EvaluateReply(
        record.unit, Statistics(record.rows, record.tokens, record.losses, counts.numpy())
    )


def pack_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Join named tensors into one array, because Flower requests each array separately."""
    data = b"".join(pieces(tensors))
    return ArrayRecord(OrderedDict({_JOINED: Array("uint8", (len(data),), _JOINED, data)}))


def unpack_record(content: RecordDict, key: str) -> Tensors:
    """Return the named tensors of a message's record. Raises ``WireError`` if it is invalid."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"message without arrays {key!r}; has {sorted(content)}")
    return unpack_tensors(record)


def unpack_tensors(record: ArrayRecord) -> Tensors:
    """Return named tensors in their order, each with separate memory.

    Raises ``WireError`` if the record is invalid.
    """
    if [*record] != [_JOINED]:
        raise WireError(f"arrays {sorted(record)[:5]} instead of one, {_JOINED!r}")
    return separated(record[_JOINED].data, MODEL_HEADER_BYTES)


def keep_stage(
    stage: UnitWithKeys | UnitWithShares | MaskedUnit | UnitWithSurvivors, state: RecordDict
) -> None:
    """Store this stage of a masked sum in a unit's state, and remove any other stage."""
    for each in _STAGES:
        state.pop(each.__name__, None)
    state.update(pack(stage))


def take_stage(kind: type[T], state: RecordDict) -> T:
    """Remove the unit's stage of a masked sum from its state and return it.

    Raises ``WireError`` if the state has another stage, which is removed too. It also raises if
    this process used the stage before, so that an old state cannot be replayed.
    """
    stages = {each.__name__: state.pop(each.__name__, None) for each in _STAGES}
    if (found := stages[kind.__name__]) is None:
        raise WireError(f"out-of-order message of a masked sum: the unit is not at {kind.__name__}")
    name = hashlib.sha256(str(found).encode()).digest()
    if name in _taken:
        raise WireError(f"{kind.__name__} was used before: a stage of a masked sum is used once")
    _taken.add(name)
    return unpack(kind, RecordDict({kind.__name__: found}))


def masked_terms(setup: Setup, clip_norm: float | None, weights: Tensors) -> bytes:
    """Return a digest of what all units of a masked sum must have received alike: the setup, the
    clip norm, and the weights from which they train.

    Units with different ones have masks that do not cancel. Otherwise a lying server could have all
    updates but one vanish, for example by a huge clip norm (Pasquini, Francati and Ateniese 2022,
    "Eluding Secure Aggregation in Federated Learning via Model Inconsistency"). It could also have
    the other units add less noise.
    """
    parts = _json(replace(setup, unit=None)), repr(clip_norm), digest(weights)
    return hashlib.sha256("\n".join(parts).encode()).digest()


def text_bytes(content: RecordDict) -> int:
    """Return the length of a message's JSON in bytes."""
    return sum(len(str(config.get("json", ""))) for config in content.config_records.values())


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of the tensors' values in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def content_bytes(content: RecordDict) -> int:
    """Return the size of all arrays in a message in bytes, as sent."""
    arrays = arrays_of(content).values()
    return sum(len(array.data) for record in arrays for array in record.values())


@dataclass(frozen=True, slots=True)
class UnitReply:
    """A unit's reply. ``state`` is parsed separately, so the rest may be valid if it is not."""

    unit: int
    state: Annotated[str, Field(max_length=REPLY_BYTES)]
    report: ClusterReport | None = None
    lacking: tuple[str, ...] = ()
    name: UnitName = ""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """``Statistics`` as sent, without counts. If ``rows`` is 0, the unit has no rows."""

    unit: int
    rows: Annotated[int, Field(ge=0, lt=2**53)] = 0
    tokens: Annotated[int, Field(ge=0, lt=2**53)] = 0
    losses: Annotated[tuple[float, ...], Field(max_length=_MOST_PARTS)] = ()


def _own_state(answer: UnitReply) -> ClusterState | Failure:
    """Return the unit's state, or a ``Failure`` if it is invalid.

    An invalid state only excludes the unit from rounds.
    """
    try:
        state = _parse(ClusterState, answer.state)
    except WireError as error:
        return Failure(type(error).__name__, one_line(error))
    if state.unit != answer.unit:
        cause = f"sent the state of unit {state.unit}, expected {answer.unit}"
        return Failure(WireError.__name__, cause)
    return state


@functools.cache  # to build one takes a millisecond
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _json(value: object) -> str:
    return _adapter(cast(Hashable, type(value))).dump_json(value).decode()


def _parse(kind: type[T], text: Any) -> T:
    try:
        return cast(T, _adapter(cast(Hashable, kind)).validate_json(text))
    except CollaPipeError as error:
        raise WireError(f"not a {kind.__name__}: {one_line(error)}") from error
    except ValidationError as error:
        raise WireError(f"not a {kind.__name__}: {fault_of(error)}") from error
