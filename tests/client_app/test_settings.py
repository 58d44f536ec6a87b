"""A unit receives the run's options once, from its server, and does what they say."""

from pathlib import Path

import pytest
import torch
from federated import settings_of
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import client_app.app as handlers
from client_app.app import app
from collapipe.plan import ClusterPlan
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.messages import (
    EvaluateRequest,
    Failure,
    KeepRequest,
    LinkAddress,
    RowsRequest,
    Setup,
    TrainRequest,
)


def test_a_run_has_the_same_options_in_all_messages(tmp_path: Path) -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    unit = Context(1, 2, {"partition-id": 0, "num-partitions": 3}, RecordDict(), {})
    texts = [settings_of(tmp_path, [f"federation.rounds={rounds}"]).text for rounds in (1, 2)]
    packed = Tokenizer.of_bytes().pack()

    def failure(kind: str, message: object) -> str:
        content = app(Message(records.pack(message), 2, kind), unit).content
        return records.unpack(Failure, content).message if Failure.__name__ in content else ""

    assert "has no setup" in failure(records.KEEP, Setup(texts[0], packed, {}))
    assert not failure(records.ROWS, RowsRequest(texts[0], words=False))
    assert "options have changed" in failure(records.ROWS, RowsRequest(texts[1], words=True))
    assert "options have changed" in failure(records.STATE, Setup(texts[1], packed, {}))
    for _ in range(2):  # a unit may be asked again
        assert not failure(records.STATE, Setup(texts[0], packed, {}))
    kept = dict(unit.state)
    for kind, message in (
        (records.STATE, Setup(texts[1], packed, {})),
        (records.ROWS, RowsRequest(texts[1], words=False)),
    ):
        assert "options have changed" in failure(kind, message)
    assert dict(unit.state) == kept


def test_a_unit_that_has_the_head_sends_no_activations_to_a_lying_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options keep activations and targets on the unit; a ``train`` message asks for them."""
    settings = settings_of(tmp_path, ["decoder.mode=control_unit"])
    setup = Setup(settings.text, Tokenizer.of_bytes().pack(), {})
    unit = Context(1, 2, {"partition-id": 0, "num-partitions": 3}, records.pack(setup), {})
    monkeypatch.setattr(handlers, "run_round", lambda *_: pytest.fail("the round began"))
    link = LinkAddress("localhost:1", b"", "server", b"", b"", "token")
    request = TrainRequest(1, ClusterPlan(0, (), 1, "gpipe"), 60.0, link)
    content = records.pack(request, weights=records.pack_tensors({}))
    reply = app(Message(content, 2, records.TRAIN), unit).content
    assert "link" in records.unpack(Failure, reply).message


@pytest.mark.parametrize(
    ("kind", "message", "option"),
    [
        (records.KEEP, KeepRequest(0), "federation.checkpoint_every=0"),
        (records.EVALUATE, EvaluateRequest("validation", 60.0), "evaluation.where=server"),
        (records.TRAIN, TrainRequest(0, ClusterPlan(0, (), 1, "gpipe"), 60.0, None), "round"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize("owned", [False, True])
def test_a_unit_does_not_do_what_the_options_exclude(
    tmp_path: Path, kind: str, message: object, option: str, owned: bool
) -> None:
    """A lying server asks for the optimiser's memory, for figures of its rows, or for steps before
    the run. An owner's unit with rows does not evaluate either if the run leaves the choice to the
    server."""
    rows = tmp_path / "rows.csv"
    rows.write_text("source,target\na,b\n")
    setup = Setup(settings_of(tmp_path, []).text, Tokenizer.of_bytes().pack(), {})
    own = {"partition-id": 0, **({"data": str(rows)} if owned else {})}
    unit = Context(1, 2, own, records.pack(setup), {})  # type: ignore[arg-type]
    unit.state["optimizer"] = records.pack_tensors({"embedding.weight/exp_avg": torch.ones(2)})
    content = records.pack(message, weights=records.pack_tensors({}))
    reply = app(Message(content, 2, kind), unit).content
    assert [*reply] == [Failure.__name__]
    assert option in records.unpack(Failure, reply).message
