"""The nodes must be as many as the units; otherwise the message says what to type."""

import pytest
from flwr.app import Message

import server_app.discovery as discovery
from client_app.app import app
from collapipe.errors import ConfigError
from collapipe.settings import FederationSettings
from server_app.grid import InlineGrid


def test_another_number_of_nodes_than_units_names_the_option_of_flwr_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "_WAIT_S", 0.0)
    grid = InlineGrid(app, 2, {"overrides": ""})
    with pytest.raises(ConfigError, match=r"2 nodes .* --federation-config 'num-supernodes=5'"):
        discovery.discover(grid, FederationSettings(num_units=5), "{}")


def test_flower_has_not_moved_what_the_grid_needs() -> None:
    """``InlineGrid`` sets Flower's task identity itself; without it no message can be made."""
    from flwr.app import RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    grid = InlineGrid(app, 1, {"overrides": ""})
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), node, "query.state")
    assert message.metadata.run_id == TaskIdentity.run_id
