"""What the server asks of units: how a reply is read, how large it may be, what a bad one costs.

A bad reply (too large, malformed, impossible, a failure or none) costs its unit, which is named
once, and no other unit:

============  =====================================================  ===============================
question      largest reply                                          a bad reply costs its unit
============  =====================================================  ===============================
rows          ``MOST_LABELS`` labels, and if asked ``MOST_WORDS``    the start; it is asked for its
              words                                                  state before each round
state         a state of 128 devices and 20,000 channels             rounds, until a usable reply
frozen        no content                                             rounds, until a usable reply
restore       no content                                             rounds, until a usable reply
train         weights as sent in the planned precision, the head's   the round
              optimiser state if it travels, a report of the steps
evaluate      the metric's counts                                    its part of the evaluation
keep          optimiser state and residuals of the model, at most    its part of the checkpoint
              the rows that the run's steps can have read
mask_keys     two keys and a signature                               the round
mask_shares   a sealed share and two digests for each unit           the round
survivors     a confirmation for each survivor                       the round
unmask        a share for each unit of the round                     the round
============  =====================================================  ===============================

``check_size`` measures a reply before any of it is parsed: parsing JSON may take 60 times its
memory.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from collapipe.errors import WireError
from collapipe.secure_aggregation.messages import (
    KeysReply,
    SharesReply,
    SurvivorsReply,
    UnmaskReply,
)
from collapipe.tensors import Tensors
from collapipe.text.labels import MOST_LABELS
from collapipe.wire import records
from collapipe.wire.messages import (
    MOST_WORDS,
    EvaluateReply,
    Failure,
    RowsReply,
    StateReply,
    TrainReply,
)
from collapipe.wire.parts import NAME_BYTES

T = TypeVar("T")
# A string may be unterminated: then it ends with the text, or each of its quotes would start anew.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_HEAD_BYTES = 2**12  # of an array record, beside its tensors
_ENVELOPE_BYTES = 2**16  # of Flower's objects around a reply's texts and arrays
_STATE_VALUES = 2**17  # of a state of 20,000 channels, and a unit's payloads
_LABEL_BYTES, _WORD_BYTES = 2**10, 2**6  # with its count; words on average
_STEP_BYTES, _ACTION_BYTES = 64, 128  # of two numbers as JSON, and of four
_PEER_BYTES = 2**9  # of a unit's number and what goes to it
_COUNTS = 2**7  # of a metric without labels


@dataclass(frozen=True, slots=True)
class Size:
    """How large a reply may be: bytes of its JSON in UTF-8, JSON values in that, and the bytes of
    each of its array records by their names."""

    json_bytes: int = 0
    values: int = 0
    arrays: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole reply as Flower sends it, at most."""
        return self.json_bytes + sum(self.arrays.values()) + _ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A kind of message, how its reply is read, and the ``size`` of the largest reply."""

    kind: str
    unpack: Callable[[RecordDict], T]
    size: Size


FAILURE = Size(2**14, 2**6)
"""The size of a ``Failure``, which a unit may send in reply to any question."""


def rows(words: bool) -> Question[RowsReply]:
    """``words``: whether the unit sends the words of its rows."""
    json_bytes = records.REPLY_BYTES + MOST_LABELS * _LABEL_BYTES
    values = MOST_LABELS + _COUNTS
    if words:
        json_bytes, values = json_bytes + MOST_WORDS * _WORD_BYTES, values + MOST_WORDS
    return Question(records.ROWS, partial(records.unpack, RowsReply), Size(json_bytes, values))


def state() -> Question[StateReply]:
    return Question(records.STATE, records.unpack_state, Size(records.REPLY_BYTES, _STATE_VALUES))


def frozen() -> Question[dict[str, Tensors]]:
    return Question(records.FROZEN, records.unpack_groups, Size())


def restore() -> Question[dict[str, Tensors]]:
    return Question(records.RESTORE, records.unpack_groups, Size())


def train(steps: int, traced: int, arrays: Mapping[str, int]) -> Question[TrainReply]:
    """A round of so many local ``steps``, with ``traced`` actions of devices; ``arrays``: bytes of
    the weights, and of the state of a head's optimiser."""
    json_bytes = records.REPLY_BYTES + steps * _STEP_BYTES + traced * _ACTION_BYTES
    values = _STATE_VALUES + 2 * steps + 5 * traced
    return Question(records.TRAIN, records.unpack_reply, Size(json_bytes, values, arrays))


def evaluate(num_labels: int) -> Question[EvaluateReply]:
    counts = 8 * max(_COUNTS, num_labels**2)
    size = Size(2**14, 2**8, {records.COUNTS: counts + NAME_BYTES + _HEAD_BYTES})
    return Question(records.EVALUATE, records.unpack_evaluation, size)


def keep(groups: Mapping[str, int]) -> Question[dict[str, Tensors]]:
    """``groups``: bytes of each group that the unit may keep."""
    return Question(records.KEEP, records.unpack_groups, Size(0, 0, groups))


def mask_keys() -> Question[KeysReply]:
    return Question(records.MASK_KEYS, partial(records.unpack, KeysReply), Size(2**12, 2**5))


def mask_shares(num_units: int) -> Question[SharesReply]:
    unpack = partial(records.unpack, SharesReply)
    return Question(records.MASK_SHARES, unpack, _for_each(num_units))


def survivors(num_units: int) -> Question[SurvivorsReply]:
    unpack = partial(records.unpack, SurvivorsReply)
    return Question(records.SURVIVORS, unpack, _for_each(num_units))


def unmask(num_units: int) -> Question[UnmaskReply]:
    return Question(records.UNMASK, partial(records.unpack, UnmaskReply), _for_each(num_units))


def _for_each(num_units: int) -> Size:
    return Size(2**12 + num_units * _PEER_BYTES, 2**5 + 2 * num_units)


def tensors_bytes(tensors: Tensors) -> int:
    """Bytes of an array record with tensors like these, at most."""
    return records.num_bytes(tensors) + NAME_BYTES * len(tensors) + _HEAD_BYTES


def check_size(content: RecordDict, most: Size) -> None:
    """Raise ``WireError`` for a reply that is larger than ``most`` or has other records than a
    reply to the question can have; a ``Failure`` has a size of its own. Nothing is parsed."""
    most = FAILURE if Failure.__name__ in content else most
    if len(content) > 1 + len(most.arrays):
        raise WireError(f"a reply of {len(content):,} records, at most {1 + len(most.arrays):,}")
    for name, record in content.items():
        if isinstance(record, ConfigRecord):
            _check_text(record, most)
        elif isinstance(record, ArrayRecord):
            _check_arrays(name, record, most.arrays.get(name))
        else:
            raise WireError(f"a reply with the record {name[:80]!r}, which no reply has")


def _check_text(record: ConfigRecord, most: Size) -> None:
    if record.keys() - {"json"}:
        raise WireError(f"a reply with {[key[:80] for key in [*record][:3]]} beside its JSON")
    text = record.get("json", "")
    if not isinstance(text, str):
        raise WireError("a reply whose JSON is no text")
    size = len(text)
    if size <= most.json_bytes:
        size = len(text.encode(errors="surrogatepass"))
    if size > most.json_bytes:
        raise WireError(f"a reply of {size:,} bytes of JSON, at most {most.json_bytes:,}")
    if size > most.values and (count := _num_values(text)) > most.values:
        raise WireError(f"a reply of {count:,} JSON values, at most {most.values:,}")


def _num_values(text: str) -> int:
    """How many values a JSON text has, at most, counted without parsing it."""
    rest = _STRING.sub("", text)
    return 1 + sum(map(rest.count, ",[{"))


def _check_arrays(name: str, record: ArrayRecord, most: int | None) -> None:
    if most is None:
        raise WireError(f"a reply with the arrays {name[:80]!r}, which were not asked for")
    size = sum(len(array.data) for array in record.values())
    if size > most:
        raise WireError(f"a reply of {size:,} bytes of {name}, at most {most:,}")
