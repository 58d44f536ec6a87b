"""The units of a run: there are as many nodes as units, and each node reports its number."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from federated import rewritten, run
from flwr.app import ConfigRecord, Context, Message, RecordDict
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units
from sections import run_settings

from client_app.app import app
from collapipe.config import Settings, load_overrides, load_text
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import unknown_cluster
from collapipe.wire import records
from collapipe.wire.messages import Failure, RowsReply, RowsRequest
from server_app import units
from server_app.kept_states import restore
from server_app.questions import connected
from server_app.roster import Roster


def test_the_error_of_too_few_units_names_the_option_of_flwr_run_unless_deployed() -> None:
    grid = InlineGrid(app, 2)
    for where in ("local", "deployment"):
        settings = run_settings(where, num_units=5, wait_s=0)
        with pytest.raises(ConfigError, match=r"^2 units connected, .*num_units=5") as raised:
            connected(grid, settings)
        named = "--federation-config 'num-supernodes=5'" in str(raised.value)
        assert named == (where == "local")


@pytest.mark.parametrize("where", ["deployment", "local"])
def test_units_on_other_machines_do_not_receive_the_servers_own_options(where: str) -> None:
    """The other options, such as the optimiser's, keep their values."""
    received = list[Settings]()

    def answering(message: Message, context: Context) -> Message:
        request = records.unpack(RowsRequest, message.content)
        assert ("secret" in request.settings) == (where == "local")
        received.append(load_text(request.settings))
        return Message(records.pack(RowsReply(0, 9, {}, {}, "")), reply_to=message)

    own = [f"{name}=secret" for name in ("runtime.federation", "tracking.mlflow", "hydra.run.dir")]
    own += [f"runtime.name={where}", "federation.num_units=1"]
    settings = load_overrides(["runtime=deployment", *own])
    units.Units(InlineGrid(answering, 1), settings).rows()  # type: ignore[arg-type]
    assert [each.optimizer for each in received] == [settings.optimizer]


def test_flower_uses_the_task_identity_that_the_grid_sets() -> None:
    """``InlineGrid`` sets Flower's task identity; without it no message can be created."""
    from flwr.supercore.task_identity import TaskIdentity

    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), node, "query.state")
    assert message.metadata.run_id == TaskIdentity.run_id


def test_a_grid_does_not_keep_replies_in_memory() -> None:
    """Each node's reply may contain a model."""

    def answering(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    grid = InlineGrid(answering, 1)  # type: ignore[arg-type]
    (node,) = grid.get_node_ids()
    replies = [*grid.send_and_receive([Message(RecordDict(), node, "query.state")])]
    for thread in threading.enumerate():
        if thread.name == "unit-0":
            thread.join()
    (reply,) = map(weakref.ref, replies)
    del replies
    gc.collect()
    assert reply() is None


WORDS = "\x1b[31mred\n" + "x" * 9999


def failing(message: Message, context: Context) -> Message:
    return Message(records.pack(Failure("ConfigError", WORDS)), reply_to=message)


def raising(message: Message, context: Context) -> Message:
    raise ValueError(WORDS)


@pytest.mark.parametrize(("client", "kind"), [(failing, ConfigError), (raising, RoundFailedError)])
def test_the_error_message_of_a_unit_is_one_short_line(
    client: object, kind: type[Exception]
) -> None:
    """Otherwise a terminal would execute control characters in the message."""
    grid = InlineGrid(client, 1)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        units.Units(grid, run_settings(num_units=1), "{}", {}).discover()
    assert str(caught.value).isprintable()
    assert "[31mred x" in str(caught.value)
    assert len(str(caught.value)) < 500


def silent(message: Message, context: Context) -> Message:
    raise ValueError("not today")


def nonsense(message: Message, context: Context) -> Message:
    return Message(
        RecordDict({"UnitReply": ConfigRecord({"json": '{"unit": "one"}'})}), reply_to=message
    )


def numbered(unit: int) -> Callable[[Message, Context], Message]:
    def client(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "query.state":
            with rewritten(reply) as decoded:
                decoded["unit"] = unit
        return reply

    return client


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (numbered(0), "two nodes reported to be unit 0"),
        (numbered(7), "unit 7, expected 0 … 2"),
        (numbered(-1), "unit -1"),
        (nonsense, "WireError"),
        (silent, "not today"),
        (failing, "ConfigError"),
    ],
    ids=["another's number", "too large", "negative", "not a number", "raises", "its options"],
)
def test_a_unit_with_an_invalid_reply_is_excluded_and_named(
    tmp_path: Path, answer: Callable[[Message, Context], Message], cause: str
) -> None:
    """The unit is asked again before every round and takes part once its reply is valid."""
    requests, honest = [0], scripted_units()

    def client(message: Message, context: Context) -> Message:
        state = message.metadata.message_type == records.STATE
        if state and context.node_config["partition-id"] == 1 and requests[0] < 2:
            requests[0] += 1
            return answer(message, context)
        return honest(message, context)

    run(tmp_path, *UNTRAINED, client=client)  # type: ignore[arg-type]
    lines = rounds_of(tmp_path)
    assert [line["units"] for line in lines] == [[0, 2], [0, 1, 2]]
    assert list(lines[0]["excluded"]) == ["1"]
    assert cause in lines[0]["excluded"]["1"]


def test_a_run_without_any_usable_unit_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError) as failed:
        run(tmp_path, client=nonsense)  # type: ignore[arg-type]
    assert str(failed.value).count("WireError") == 1


def test_a_unit_that_was_not_restored_gets_even_an_empty_state_later() -> None:
    """The unit may still have state of rounds after the checkpoint."""
    restored = list[tuple[object, list[str]]]()

    def client(message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        if message.metadata.message_type == records.STATE:
            return Message(records.pack(records.UnitReply(unit, "none")), reply_to=message)
        restored.append((unit, [*records.unpack_groups(message.content)]))
        failed = Failure("DeviceError", "busy") if len(restored) < 3 and unit == 1 else None
        content = records.pack(failed) if failed else records.pack_groups({})
        return Message(content, reply_to=message)

    grid = InlineGrid(client, 2)  # type: ignore[arg-type]
    two_units = units.Units(grid, run_settings(num_units=2))
    two_units.nodes = dict(enumerate(grid.get_node_ids()))
    assert [*restore(two_units, {0: {"optimizer": {}}})] == [1]
    assert sorted(restored) == [(0, ["optimizer"]), (1, [])]
    roster = Roster((unknown_cluster(0), Failure("DeviceError", "busy")))
    two_units.ask_again(1, roster)
    assert restored[2:] == [(1, [])]
    two_units.ask_again(2, roster)
    assert len(restored) == 3
