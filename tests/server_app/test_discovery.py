"""The nodes must be as many as the units; otherwise the message says what to type."""

import pytest
from flwr.app import Context, Message
from sections import federation_settings

import server_app.discovery as discovery
from client_app.app import app
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.wire import records
from server_app.grid import InlineGrid


def test_another_number_of_nodes_than_units_names_the_option_of_flwr_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "_WAIT_S", 0.0)
    grid = InlineGrid(app, 2, {"overrides": ""})
    with pytest.raises(ConfigError, match=r"2 nodes .* --federation-config 'num-supernodes=5'"):
        discovery.discover(grid, federation_settings(num_units=5), "{}", {})


def test_flower_has_not_moved_what_the_grid_needs() -> None:
    """``InlineGrid`` sets Flower's task identity itself; without it no message can be made."""
    from flwr.app import RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    grid = InlineGrid(app, 1, {"overrides": ""})
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), node, "query.state")
    assert message.metadata.run_id == TaskIdentity.run_id


WORDS = "\x1b[31mred\n" + "x" * 9999


def failing(message: Message, context: Context) -> Message:
    return Message(records.pack_failure(ConfigError(WORDS)), reply_to=message)


def raising(message: Message, context: Context) -> Message:
    raise ValueError(WORDS)


@pytest.mark.parametrize(("client", "kind"), [(failing, ConfigError), (raising, RoundFailedError)])
def test_what_a_unit_says_is_one_short_line(client: object, kind: type[Exception]) -> None:
    """A terminal would do what it holds."""
    grid = InlineGrid(client, 1, {"overrides": ""})  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        discovery.discover(grid, federation_settings(num_units=1), "{}", {})
    assert str(caught.value).isprintable()
    assert "[31mred x" in str(caught.value)
    assert len(str(caught.value)) < 500
