"""The server checks a reply's size before it parses the reply; a bad reply excludes its sender."""

import itertools
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from sections import run_settings

from client_app.app import app
from collapipe.errors import ConfigError, RoundFailedError, WireError
from collapipe.flower.inline_grid import InlineGrid
from collapipe.process import cancellation
from collapipe.state import unknown_cluster
from collapipe.tasks.classification import Classification
from collapipe.text.vocabulary import MOST_LABELS
from collapipe.wire import records
from collapipe.wire.messages import KEPT, Failure, RowsReply, Setup
from server_app import questions
from server_app.exclusions import unfit_labels
from server_app.places import Places
from server_app.questions import FAILURE, Question, answered, check_size
from server_app.roster import Roster
from server_app.units import Units

WEIGHTS = {"blocks.0.weight": torch.zeros(9, 9), "blocks.0.bias": torch.zeros(9)}
ARRAYS = {records.WEIGHTS: WEIGHTS, records.HEAD_STATE: WEIGHTS}
SIZES = {name: questions.tensors_bytes(tensors) for name, tensors in ARRAYS.items()}
TABLE: dict[str, Question[Any]] = {
    each.kind: cast(Question[Any], each)
    for each in (
        questions.rows(words=False),
        questions.STATE,
        questions.FROZEN,
        questions.RESTORE,
        questions.train(steps=20, traced=240, arrays=SIZES),
        questions.evaluate(num_labels=3),
        questions.keep(dict.fromkeys(KEPT, questions.tensors_bytes(WEIGHTS)), lambda kept: None),
        questions.MASK_KEYS,
        questions.mask_shares(num_units=5),
        questions.survivors(num_units=5),
        questions.unmask(num_units=5),
    )
}


def test_the_table_has_every_message_that_a_unit_answers() -> None:
    assert {name.removesuffix(".default") for name in app._registered_funcs} == TABLE.keys()


def reply_of(*records_: tuple[str, Any]) -> Message:
    InlineGrid(app, 1)  # messages can be created after this
    return Message(RecordDict(dict(records_)), 2, "query.any")


def never(*arguments: object) -> None:
    raise AssertionError("parsed")


def text(json: str) -> tuple[str, ConfigRecord]:
    return "UnitReply", ConfigRecord({"json": json})


def lies(question: Question[Any], more: int) -> dict[str, Callable[[], tuple[str, Any]]]:
    """Records that are too large for a reply to the question, or that do not belong in it."""
    size = question.size
    nested = "[" * (size.values + more)
    arrays = {
        f"arrays {name}": partial(_arrays, name, most + more) for name, most in size.arrays.items()
    }
    return {
        "longer": lambda: text("x" * (size.json_bytes + more)),
        "wider": lambda: text("ä" * (size.json_bytes // 2 + more)),
        "nested": lambda: text(nested if size.values < size.json_bytes else "x" * 2**21),
        "beside": lambda: ("UnitReply", ConfigRecord({"json": "", "more": "x"})),
        "bytes": lambda: ("UnitReply", ConfigRecord({"json": b"{}"})),
        "metrics": lambda: ("metrics", MetricRecord({"x": 1.0})),
        "other arrays": lambda: _arrays("other", 1),
        "failure": lambda: ("Failure", ConfigRecord({"json": "x" * (FAILURE.json_bytes + more)})),
        **arrays,
    }


def _arrays(name: str, size: int) -> tuple[str, Any]:
    return name, records.pack_tensors({"x": torch.zeros(size, dtype=torch.uint8)})


@given(st.sampled_from(sorted(TABLE)), st.integers(1, 3), st.data())
def test_a_reply_that_is_too_large_is_refused_before_anything_is_parsed(
    kind: str, more: int, data: st.DataObject
) -> None:
    each = lies(TABLE[kind], more)
    lie = each[data.draw(st.sampled_from(sorted(each)))]()
    with patch.object(records, "_parse", never), patch.object(records, "separated", never):
        result = answered(reply_of(lie), TABLE[kind])
    assert isinstance(result, Failure) and result.kind == "WireError"


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_a_reply_with_too_many_records_is_refused(kind: str) -> None:
    many = {f"UnitReply{i}": ConfigRecord({"json": "{}"}) for i in range(99)}
    with pytest.raises(WireError, match="99 records"):
        check_size(RecordDict(many), TABLE[kind].size)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_the_largest_possible_arrays_are_accepted(name: str) -> None:
    check_size(RecordDict({name: records.pack_tensors(ARRAYS[name])}), TABLE[records.TRAIN].size)


def test_the_largest_number_of_labels_and_words_is_accepted() -> None:
    labels = {f"{number:0200}": 2**13 for number in range(MOST_LABELS)}
    reply = RowsReply(0, 2**52, labels, {}, "x" * 64)
    check_size(records.pack(reply), questions.rows(words=False).size)
    with patch.object(questions, "MOST_WORDS", 10):
        words = {f"Ġhen{number}": 9 for number in range(10)}
        check_size(records.pack(RowsReply(0, 1, {}, words)), questions.rows(words=True).size)


VALUES = st.recursive(
    st.text('["{,\\', max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("[,", max_size=2), inner),
    max_leaves=6,
)


@given(VALUES)
def test_json_values_are_counted(value: object) -> None:
    """The count is never too low, and at most twice the true number."""

    def parts(of: object) -> int:
        inner = [*of.values()] if isinstance(of, dict) else of if isinstance(of, list) else []
        return 1 + sum(map(parts, inner))

    assert parts(value) <= questions._num_values(json.dumps(value)) <= 2 * parts(value)


def federated(answers: Mapping[int, Callable[[Message, Context], RecordDict]]) -> InlineGrid:
    """A grid with a node for each of these answers; the nodes do not train."""

    def client(message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        return Message(answers[unit](message, context), reply_to=message)

    return InlineGrid(client, len(answers))  # type: ignore[arg-type]


def honest(name: str = "", labels: Mapping[str, int] = {"a": 1, "b": 1}) -> Any:
    """A unit that has rows and no cluster."""

    def answer(message: Message, context: Context) -> RecordDict:
        unit = int(context.node_config["partition-id"])
        if message.metadata.message_type == records.ROWS:
            return records.pack(RowsReply(unit, 9, labels, {}, name))
        assigned = records.unpack(Setup, message.content).unit
        return records.pack(
            records.UnitReply(unit if assigned is None else assigned, "none", name=name)
        )

    return answer


def failing(message: Message, context: Context) -> RecordDict:
    return records.pack(Failure("ConfigError", 'error: "pay\x1b[31m\n' + "x" * 900))


def raising(message: Message, context: Context) -> RecordDict:
    raise ValueError("the battery is empty")


def nested(message: Message, context: Context) -> RecordDict:
    text = "[" * 2**20 + "]" * 2**20
    return RecordDict({"RowsReply": ConfigRecord({"json": text})})


def laden(message: Message, context: Context) -> RecordDict:
    reply = honest()(message, context)
    reply["junk"] = records.pack_tensors({"x": torch.zeros(9)})
    return cast(RecordDict, reply)


@pytest.mark.parametrize("answer", [failing, raising, nested, laden])
def test_a_bad_reply_at_the_start_excludes_only_its_unit_and_is_logged_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    grid = federated({0: honest(), 1: answer, 2: honest()})
    units = Units(grid, run_settings(min_units=2))
    assert [*units.rows()] == [0, 2]
    later = Units(grid, units.settings, places=units.places)
    assert [isinstance(each, Failure) for each in later.discover()] == [True] * 3
    later.ask_again(1, Roster(()))
    (line,) = (each for each in caplog.messages if "is excluded" in each)
    assert line.startswith("node 3 is excluded") and line.isprintable() and len(line) < 600
    if answer is failing:
        assert """ConfigError: "error: 'pay [31m xxx""" in line


def test_an_unterminated_string_is_counted_in_linear_time() -> None:
    """If each escaped quote began a search for the end, a megabyte would take an hour."""
    text = '"' + '\\"' * 2**19
    began = time.process_time()
    assert questions._num_values(text) == 1
    assert time.process_time() - began < 5


def test_options_that_some_units_cannot_use_end_a_run_without_owners() -> None:
    grid = federated({0: honest(), 1: failing, 2: honest()})
    with pytest.raises(ConfigError, match="2 of 3 units can begin, at least 3 must"):
        Units(grid, run_settings()).rows()
    owners = Places(signed=lambda: {2: "ann", 3: "eve", 4: "bob"})
    answers = {n: honest(name) if n != 1 else failing for n, name in enumerate(("ann", "", "bob"))}
    assert [*Units(federated(answers), run_settings(), places=owners).rows()] == [0, 2]


def test_too_few_units_end_the_run_with_an_error_of_a_unit() -> None:
    grid = federated({0: failing, 1: failing, 2: honest()})
    with pytest.raises(ConfigError, match=r"1 of 3 .* at least 2 must \(.*\): node 2") as few:
        Units(grid, run_settings(min_units=2)).rows()
    assert str(few.value).count("ConfigError:") == 1


def test_too_few_units_with_a_usable_state_end_the_run() -> None:
    """Their rows may be usable, but, for example, not their devices."""

    def with_rows_only(message: Message, context: Context) -> RecordDict:
        has_rows = message.metadata.message_type == records.ROWS
        return cast(RecordDict, (honest() if has_rows else failing)(message, context))

    answers = {0: honest(), 1: with_rows_only, 2: with_rows_only}
    units = Units(federated(answers), run_settings(min_units=2))
    assert [*units.rows()] == [0, 1, 2]
    with pytest.raises(ConfigError, match="1 of 3 units can begin, at least 2 must"):
        units.discover()
    assert len(Units(federated(answers), run_settings()).discover()) == 3


def test_a_cause_common_to_all_units_is_reported_first_and_once() -> None:
    answers = {n: lambda *_: records.pack(Failure("ConfigError", "no column")) for n in range(3)}
    with pytest.raises(ConfigError, match=r'^"no column" \(0 of 3 units can begin\)$'):
        Units(federated(answers), run_settings()).rows()
    with pytest.raises(RoundFailedError, match=r"^\w+: .* \(0 of 1 units can begin\)$"):
        Units(federated({0: raising}), run_settings(num_units=1)).rows()


def test_the_latest_failure_of_an_excluded_unit_is_reported_and_its_node_asked_less_often() -> None:
    requests = list[str]()

    def unfit(message: Message, context: Context) -> RecordDict:
        requests.append(message.metadata.message_type)
        return records.pack(Failure("OwnerError", "its rows have no column that x names"))

    owners = Places(of={"ann": 0, "bob": 1}, signed=lambda: {2: "ann", 3: "bob"})
    units = Units(federated({0: honest("ann"), 1: unfit}), run_settings(num_units=2), places=owners)
    units.nodes = {0: 2}
    roster = Roster((unknown_cluster(0), Failure("Absent", "no node has this number")))
    answered = [round_ for round_ in range(1, 9) if units.ask_again(round_, roster)[0]]
    assert answered == [1, 2, 4, 8] and len(requests) == 4
    (reported,) = units.ask_again(16, roster)[0].items()
    assert reported == (1, Failure("OwnerError", '"its rows have no column that x names"'))


def test_a_silent_unit_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """The server asks it again later, but not before the first round."""
    released, requests = False, list[str]()

    def silent(message: Message, context: Context) -> RecordDict:
        requests.append(message.metadata.message_type)
        while not released:
            time.sleep(0.005)
            cancellation.check()
        return cast(RecordDict, honest()(message, context))

    grid = federated({0: honest(), 1: silent})
    units = Units(grid, run_settings(num_units=2, round_timeout_s=2.0))
    assert [*units.rows()] == [0]
    later = Units(grid, units.settings, places=units.places)
    assert "Timeout" in str(later.discover()[1])
    later.ask_again(1, Roster(()))
    assert requests == ["query.rows"]
    released = True
    assert [*later.ask_again(2, Roster(()))[0]] == [1]
    assert requests == ["query.rows", "query.state"]


TASK = Classification(None, True, 300, 32)


def replies_with_labels(*counts: int) -> dict[int, RowsReply]:
    """Replies of nodes; node n has two common labels and ``counts[n]`` labels that no other has."""
    return {
        node: RowsReply(
            node, 9, dict.fromkeys(["a", "b", *(f"{node}-{i}" for i in range(n))], 1), {}
        )
        for node, n in enumerate(counts)
    }


def test_a_unit_that_invents_labels_is_excluded() -> None:
    replies = replies_with_labels(0, 9000, 3)
    unfit = unfit_labels(replies, TASK)
    assert [*unfit] == [1] and "9,002 labels, 9,000 of which no other unit has" in str(unfit[1])
    assert unfit_labels(replies_with_labels(0, 100, 100), TASK) == {}
    listed = Classification(None, True, 300, 32, labels=("a", "b"))
    assert [*unfit_labels(replies, listed)] == [1, 2]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_the_remaining_labels_do_not_exceed_the_limit(counts: list[int]) -> None:
    replies = replies_with_labels(*counts)
    left = replies.keys() - unfit_labels(replies, TASK).keys()
    assert len({label for node in left for label in replies[node].labels}) <= TASK.max_labels
    assert left or min(counts) + 2 > TASK.max_labels


def test_a_unit_with_too_many_labels_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    grid = federated({0: honest(), 1: honest(labels={str(n): 1 for n in range(300)})})
    units = Units(grid, run_settings(num_units=2))
    assert [*units.rows(task=TASK)] == [0]
    later = Units(grid, units.settings, places=units.places)
    later.discover()
    later.ask_again(1, Roster(()))
    assert [*later.nodes] == [0]
    assert sum("raise task.max_labels" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("order", [*itertools.permutations([11, 12, 13])])
def test_a_certified_unit_has_the_place_of_its_name(order: tuple[int, ...]) -> None:
    """The order of replies and the reported numbers do not matter."""
    named = {11: "paris", 12: "rome", 13: "mallory"}
    reserved = {"berlin": 0, "paris": 1, "rome": 2}
    places = Places(signed=lambda: named, reserved=reserved)
    numbers = {11: 2, 12: 2, 13: 1}
    answers: dict[int, RowsReply | Failure] = {
        node: RowsReply(numbers[node], 1, {}, {}, named[node]) for node in order
    }
    places.claim_all(answers, 4, set())
    found = {named[node]: each for node, each in answers.items()}
    assert [cast(RowsReply, found[name]).unit for name in ("paris", "rome")] == [1, 2]
    assert "unit 1 is paris, and mallory claims the same number" in str(found["mallory"])
    assert places.called(0) == "berlin" and places.of_node(13, named) == "mallory"


def test_certificates_are_read_once_a_question() -> None:
    """The number of reads does not grow with the number of units or of failures."""

    def reads(num_units: int) -> int:
        read = Mock(return_value={node: f"unit-{node}" for node in range(2, num_units + 2)})
        names = {unit: f"unit-{unit + 2}" for unit in range(num_units)}
        grid = federated(
            {unit: honest(name) if unit % 2 else failing for unit, name in names.items()}
        )
        units = Units(grid, run_settings(num_units=num_units, min_units=1))
        units.places.signed = read
        assert len(units.rows()) == num_units // 2
        units.discover()
        Units(grid, units.settings, places=Places(signed=read)).discover()
        return read.call_count

    assert reads(4) == reads(30)


def test_a_node_without_a_valid_certificate_has_no_place() -> None:
    places = Places(signed=dict)
    with pytest.raises(WireError, match="'rome', and has no valid certificate"):
        places.check_signed(17, "rome", {})


def test_a_resumed_run_keeps_the_places_of_its_units() -> None:
    """A new list of units does not give the place of a run's unit to another unit."""
    places = Places({"rome": 0, "paris": 1}, dict, {"paris": 0, "oslo": 1, "bern": 2})
    assert [places.name(place) for place in range(3)] == ["rome", "paris", "bern"]
    with pytest.raises(WireError, match="unit 1 is paris, and oslo claims"):
        places.claim("oslo", 5, 3, set())
