"""The server's questions to units: how a reply is parsed, its largest size, and the effect of an
invalid one.

A reply is invalid if it is too large, malformed, impossible, a failure or missing. It is logged
once and affects only its unit:

============  =====================================================  ===============================
question      largest reply                                          an invalid reply excludes from
============  =====================================================  ===============================
rows          ``MOST_LABELS`` labels, and if asked ``MOST_WORDS``    the start; it is asked for its
              words                                                  state before each round
state         a state of 128 devices and 20,000 channels             rounds, until a usable reply
frozen        no content                                             rounds, until a usable reply
restore       no content                                             rounds, until a usable reply
train         weights in the planned precision, the head's           the round
              optimiser state if it is sent, a report of the steps
evaluate      the metric's counts                                    the evaluation
keep          optimiser state and residuals of the model, and at     the checkpoint
              most the rows that the run's steps can have read
mask_keys     two keys and a signature                               the round
mask_shares   a sealed share and two digests for each unit           the round
survivors     a confirmation for each survivor                       the round
unmask        a share for each unit of the round                     the round
============  =====================================================  ===============================

``check_size`` measures a reply before it is parsed, because parsing JSON can take 60 times its
size in memory.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from collapipe.config import Settings
from collapipe.errors import ConfigError, WireError, one_line
from collapipe.flower.reply_parts import UNUSABLE
from collapipe.formatting import counted
from collapipe.secure_aggregation.messages import (
    KeysReply,
    SharesReply,
    SurvivorsReply,
    UnmaskReply,
)
from collapipe.tensors import Tensors
from collapipe.text.vocabulary import MOST_LABELS
from collapipe.wire import records
from collapipe.wire.messages import MOST_WORDS, EvaluateReply, Failure, RowsReply, TrainReply
from collapipe.wire.parts import NAME_BYTES
from server_app.roster import ABSENT

T = TypeVar("T")
# An unterminated string ends with the text; else each of its quotes would start a new match.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_HEAD_BYTES = 2**12  # an array record without its tensors
_ENVELOPE_BYTES = 2**16  # Flower's objects around a reply's texts and arrays
_STATE_VALUES = 2**17  # JSON values of a state with 20,000 channels and a unit's payloads
_LABEL_BYTES, _WORD_BYTES = 2**10, 2**6  # each with its count; a word's size is an average
_STEP_BYTES, _ACTION_BYTES = 64, 128  # two numbers as JSON, and four
_PEER_BYTES = 2**9  # a unit's number and its entry
_COUNTS = 2**7  # counts of a metric without labels
_POLL_S = 0.5
_AT_ONCE = 8  # units whose states are in memory at the same time
_LONGEST_KIND = 64  # characters of an error's name
_HAS_LEFT = "has left, or its machine cannot be reached"
_UNAVAILABLE = 3, 4, 5  # Flower's codes of errors of a node that is gone


@dataclass(frozen=True, slots=True)
class Size:
    """The largest size of a reply: bytes of its JSON in UTF-8, number of JSON values, and bytes of
    each of its array records by name."""

    json_bytes: int = 0
    values: int = 0
    arrays: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The largest size in bytes of the whole reply as Flower sends it."""
        return self.json_bytes + sum(self.arrays.values()) + _ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A kind of message, the function that parses its reply, and the largest ``size`` of the
    reply."""

    kind: str
    unpack: Callable[[RecordDict], T]
    size: Size


Asked = tuple[Question[T], RecordDict]
"""A question to one unit or node, and the content of its message."""
FAILURE = Size(2**14, 2**6)
"""The size of a ``Failure``, which a unit may send in reply to any question."""
STATE = Question(records.STATE, records.unpack_state, Size(records.REPLY_BYTES, _STATE_VALUES))
FROZEN = Question(records.FROZEN, records.unpack_groups, Size())
RESTORE = Question(records.RESTORE, records.unpack_groups, Size())
MASK_KEYS = Question(records.MASK_KEYS, partial(records.unpack, KeysReply), Size(2**12, 2**5))


def rows(words: bool) -> Question[RowsReply]:
    """Ask for a summary of training rows; ``words`` requests the words of the rows, too."""
    json_bytes = records.REPLY_BYTES + MOST_LABELS * _LABEL_BYTES
    values = MOST_LABELS + _COUNTS
    if words:
        json_bytes, values = json_bytes + MOST_WORDS * _WORD_BYTES, values + MOST_WORDS
    return Question(records.ROWS, partial(records.unpack, RowsReply), Size(json_bytes, values))


def train(steps: int, traced: int, arrays: Mapping[str, int]) -> Question[TrainReply]:
    """Ask for a round of local ``steps`` with at most ``traced`` actions of devices. ``arrays`` has
    the bytes of the weights and of the head's optimiser state."""
    json_bytes = records.REPLY_BYTES + steps * _STEP_BYTES + traced * _ACTION_BYTES
    values = _STATE_VALUES + 2 * steps + 5 * traced
    return Question(records.TRAIN, records.unpack_reply, Size(json_bytes, values, arrays))


def evaluate(num_labels: int) -> Question[EvaluateReply]:
    counts = 8 * max(_COUNTS, num_labels**2)
    size = Size(2**14, 2**8, {records.COUNTS: counts + NAME_BYTES + _HEAD_BYTES})
    return Question(records.EVALUATE, records.unpack_evaluation, size)


def keep(
    groups: Mapping[str, int], check: Callable[[dict[str, Tensors]], None]
) -> Question[dict[str, Tensors]]:
    """Ask for a unit's state; ``groups`` has the largest size in bytes of each group, and ``check``
    raises ``WireError`` for an impossible state."""

    def unpack(content: RecordDict) -> dict[str, Tensors]:
        kept = records.unpack_groups(content)
        check(kept)
        return kept

    return Question(records.KEEP, unpack, Size(0, 0, groups))


def _on_each(kind: str, reply: type[T], num_units: int) -> Question[T]:
    """Return a question whose reply has an entry for each of the units."""
    size = Size(2**12 + num_units * _PEER_BYTES, 2**5 + 2 * num_units)
    return Question(kind, partial(records.unpack, reply), size)


mask_shares = partial(_on_each, records.MASK_SHARES, SharesReply)
survivors = partial(_on_each, records.SURVIVORS, SurvivorsReply)
unmask = partial(_on_each, records.UNMASK, UnmaskReply)


def tensors_bytes(tensors: Tensors) -> int:
    """Return the largest size in bytes of an array record with tensors like these."""
    return records.num_bytes(tensors) + NAME_BYTES * len(tensors) + _HEAD_BYTES


def check_size(content: RecordDict, most: Size) -> None:
    """Raise ``WireError`` if a reply is larger than ``most`` or has unexpected records. A
    ``Failure`` has a separate limit. Nothing is parsed."""
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
        raise WireError(f"a reply with {[key[:80] for key in [*record][:3]]} besides its JSON")
    text = record.get("json", "")
    if not isinstance(text, str):
        raise WireError("a reply whose JSON is not a text")
    size = len(text)
    if size <= most.json_bytes:
        size = len(text.encode(errors="surrogatepass"))
    if size > most.json_bytes:
        raise WireError(f"a reply of {size:,} bytes of JSON, at most {most.json_bytes:,}")
    if size > most.values and (count := _num_values(text)) > most.values:
        raise WireError(f"a reply of {count:,} JSON values, at most {most.values:,}")


def _num_values(text: str) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing it."""
    rest = _STRING.sub("", text)
    return 1 + sum(map(rest.count, ",[{"))


def _check_arrays(name: str, record: ArrayRecord, most: int | None) -> None:
    if most is None:
        raise WireError(f"a reply with the arrays {name[:80]!r}, which were not asked for")
    size = sum(len(array.data) for array in record.values())
    if size > most:
        raise WireError(f"a reply of {size:,} bytes of {name}, at most {most:,}")


def connected(grid: Grid, settings: Settings) -> list[int]:
    """Wait up to ``federation.wait_s`` for ``federation.num_units`` nodes, and return them. Raises
    ``ConfigError`` if there are too few or too many."""
    federation, deployed = settings.federation, settings.runtime.name == "deployment"
    wanted, least = federation.num_units, federation.min_units or federation.num_units
    deadline = time.monotonic() + federation.wait_s
    while len(nodes := list(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not least <= len(nodes) <= wanted:
        simulated = f" (simulated ones by --federation-config 'num-supernodes={wanted}')"
        raise ConfigError(
            f"{counted(len(nodes), 'unit')} connected, federation.num_units={wanted}; start the "
            f"others{'' if deployed else simulated}, set federation.num_units, or "
            "federation.min_units to begin with fewer"
        )
    return nodes


def answered(reply: Message, question: Question[T]) -> T | Failure:
    """Return a node's answer, or a failure if it is unusable. The reply's size is checked before it
    is parsed. A failure message that the unit wrote is put in quotes."""
    if reply.has_error() and reply.error.code == UNUSABLE:
        return Failure("WireError", one_line(reply.error.reason))
    if reply.has_error():
        if reply.error.code in _UNAVAILABLE:  # Flower's text blames heartbeats in every case
            return Failure(ABSENT, _HAS_LEFT)
        return Failure("ClientApp", _quoted(reply.error.reason or ""))
    try:
        check_size(reply.content, question.size)
        if Failure.__name__ not in reply.content:
            return question.unpack(reply.content)
        failure = records.unpack(Failure, reply.content)
    except WireError as error:
        return Failure("WireError", one_line(error))
    named = failure.kind.isidentifier() and len(failure.kind) <= _LONGEST_KIND
    return Failure(failure.kind if named else Failure.__name__, _quoted(failure.message))


def _quoted(words: str) -> str:
    """Put another machine's text on one line and in quotes, so that readers see its origin."""
    return '"' + one_line(words).replace('"', "'") + '"'


def apart(answers: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """Separate the answers from the failures."""
    usable = {key: each for key, each in answers.items() if not isinstance(each, Failure)}
    return usable, {key: each for key, each in answers.items() if isinstance(each, Failure)}


def groups_of(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split the keys into groups of at most ``_AT_ONCE``."""
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))
