"""How a unit treats the tokeniser that its server sends."""

from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

import client_app.app as handlers
from client_app import node
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.flower.inline_grid import InlineGrid
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.messages import Failure, Setup


@pytest.mark.parametrize("owned", [True, False])
def test_a_unit_of_an_owner_checks_the_servers_tokenizer(
    owned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is checked like the tokeniser of a downloaded run. A unit that the server simulates skips
    the check."""
    tried, text = list[tuple[str, ...]](), Tokenizer.of_bytes().pack()

    def check(*arguments: str) -> None:
        tried.append(arguments)
        raise ConfigError("takes all memory")

    monkeypatch.setattr(node, "check_tokenizer", check)
    InlineGrid(handlers.app, 1)  # needed to make messages
    settings = load_overrides(["task=classification", "model=huggingface", "model.family=bert"])
    message = Message(records.pack(Setup(settings.text, text, {})), 2, records.STATE)
    own: dict[str, str | int] = {"data": str(tmp_path)} if owned else {"partition-id": 0}
    context = Context(1, 2, own, RecordDict(), {})  # type: ignore[arg-type]
    reply = handlers.app(message, context)
    failure = records.unpack(Failure, reply.content)
    assert tried == ([(text, "packed")] if owned else [])
    assert (Setup.__name__ in context.state) != owned
    assert ("the run's tokeniser: takes all memory" in failure.message) == owned
