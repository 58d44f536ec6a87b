"""What a unit does with the tokeniser that its server sends."""

from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

import client_app.app as handlers
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.flower.inline_grid import InlineGrid
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.messages import Failure, Setup


@pytest.mark.parametrize("owned", [True, False])
def test_a_unit_of_an_owner_tries_the_servers_tokeniser_apart(
    owned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As what somebody else's run folder holds; where the unit is the server's own, it does not."""
    tried, text = list[tuple[str, ...]](), Tokenizer.of_bytes().pack()

    def check(*asked: str) -> None:
        tried.append(asked)
        raise ConfigError("takes all memory")

    monkeypatch.setattr(handlers, "check_tokenizer", check)
    InlineGrid(handlers.app, 1)  # which lets messages be made
    settings = load_overrides(["task=classification", "model=huggingface", "model.family=bert"])
    message = Message(records.pack(Setup(settings.text, text, {})), 2, records.STATE)
    own: dict[str, str | int] = {"data": str(tmp_path)} if owned else {"partition-id": 0}
    context = Context(1, 2, own, RecordDict(), {})  # type: ignore[arg-type]
    reply = handlers.app(message, context)
    told = records.unpack(Failure, reply.content)
    assert tried == ([(text, "packed")] if owned else [])
    assert (Setup.__name__ in context.state) != owned
    assert ("the run's tokeniser: takes all memory" in told.message) == owned
