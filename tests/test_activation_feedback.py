"""Changes of activations through server, units and decoder link: both ends remember the same."""

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import grid_of, rewritten, run, settings_of, train, weights
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from test_chosen_heads import places, turning
from test_fewer_bits import rounds, states
from test_tasks_end_to_end import CAUSAL, ENCODER, SHORT
from torch import Tensor

from client_app import app, link
from client_app.app import _keep, _kept
from client_app.app import app as units
from collapipe import cancellation, config
from collapipe.config import Settings
from collapipe.errors import CancelledRoundError, ConfigError
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.feedback import ActivationMemory, ChangeCoder
from pipeline.engine import Pipeline
from server_app import roster
from server_app.decoding.heads import Heads

FEEDBACK = "compression.feedback=true"
INT4 = (
    FEEDBACK,
    "compression.activation=int4",
    "model.dropout=0",
    "model.num_blocks=2",
    "federation.rounds=3",
)
Ends = tuple[ActivationMemory, ActivationMemory]  # the server's, and the unit's


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.thorough)])
def test_exact_activations_end_with_the_same_weights(tmp_path: Path, dtype: str) -> None:
    """To the bit, dropout and all."""
    shared = (f"pipeline.dtype={dtype}", "federation.rounds=3", "model.num_blocks=2")
    without = run(tmp_path / "without", *shared)
    with_it = run(tmp_path / "with", *shared, FEEDBACK)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def watched(
    run_dir: Path, *overrides: str, client: ClientApp | None = None
) -> list[dict[int, Ends]]:
    """The memories of each unit after each round of a tiny run."""
    return watch(*settings_of(run_dir, overrides), client)


def watch(
    settings: Settings, settled: Sequence[str], client: ClientApp | None = None
) -> list[dict[int, Ends]]:
    """The same of any run."""
    grid, seen = grid_of(settings, settled, client), list[dict[int, Ends]]()
    keep_states = Heads.keep_states

    def kept(context: Context, key: str) -> ActivationMemory:
        record = _kept(context).get(key, {})
        return ActivationMemory.unpack(record, settings.model.dim, torch.float32)

    def keep(self: Heads, finished: Mapping[int, Tensors]) -> None:
        keep_states(self, finished)
        both = dict[int, Ends]()
        for unit, context in enumerate(grid._contexts.values()):
            known, last = (kept(context, key) for key in ("activations", "last_activations"))
            server = self.remembered(unit)
            both[unit] = server, known.agreed(last, server.round)
        seen.append(both)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heads, "keep_states", keep)
        train(grid, settings)
    return seen


def same(first: ActivationMemory, second: ActivationMemory) -> bool:
    return (first.round, first.rows.keys()) == (second.round, second.rows.keys()) and all(
        torch.equal(tokens, second.rows[row]) for row, tokens in first.rows.items()
    )


def alike(seen: list[dict[int, Ends]], units: Collection[int] = range(3)) -> bool:
    return all(same(*both[unit]) for both in seen for unit in units)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("compression.activation=int8",), marks=pytest.mark.thorough),
        pytest.param(
            ("compression.activation=int4", "decoder.mode=shared", "pipeline.num_micro_batches=3"),
            marks=pytest.mark.thorough,
        ),
        ("compression.activation=bfloat16", "compression.gradient=int4", "adapter=lora"),
        pytest.param(
            ("compression.activation=int6", "framework=pipeline"), marks=pytest.mark.thorough
        ),
        pytest.param(
            ("compression=auto", "channel.bandwidth_hz=[1e4,1e4]"), marks=pytest.mark.thorough
        ),
    ],
    ids=lambda options: options[-1],
)
def test_both_ends_remember_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    seen = watched(tmp_path, FEEDBACK, *options, "federation.rounds=3")
    assert alike(seen)
    assert [ends[0].round for ends in seen[-1].values()] == [3, 3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "task", ["classification", pytest.param("ner", marks=pytest.mark.thorough), "causal_lm"]
)
def test_so_they_do_for_every_kind_of_head(
    tmp_path: Path, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the rows' first, labelled and all tokens; and when all rows have been sent, they are as
    large as the unit said that they will be."""
    own = (FEEDBACK, "compression.activation=int6", f"task={task}", "data.max_train_samples=99")
    model = CAUSAL if task == "causal_lm" else ENCODER
    overrides = [*SHORT, *own, *model, f"hydra.run.dir={tmp_path}", "federation.local_steps=3"]
    with caplog.at_level("INFO", "client_app"):
        seen = watch(config.load_overrides(overrides), overrides)
    assert alike(seen)
    said = dict(each.args for each in caplog.records if "feedback" in each.msg)  # type: ignore[misc]
    for unit, (server, _) in seen[-1].items():
        size = sum(tokens.nbytes for tokens in server.rows.values())
        most = int(said[unit].replace(",", ""))
        assert size <= most if task == "ner" else size == most  # marks have no labels


class Once(ClientApp):
    """The real ClientApp, but for what unit 1 does after its second round."""

    def __init__(self, fault: Callable[[Message, Context, Message], Message]) -> None:
        self._fault = fault

    def __call__(self, message: Message, context: Context) -> Message:
        reply = units(message, context)
        due = message.metadata.message_type == "train" and message.metadata.group_id == "2"
        if due and context.node_config["partition-id"] == 1:
            return self._fault(message, context, reply)
        return reply


def _lies(message: Message, context: Context, reply: Message) -> Message:
    with rewritten(reply) as told:
        told["report"]["samples"] = 10**9
    return reply


def _sends_no_weights(message: Message, context: Context, reply: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def _explodes(message: Message, context: Context, reply: Message) -> Message:
    raise ValueError("the battery is empty")


def _forgets(message: Message, context: Context, reply: Message) -> Message:
    groups = _kept(context)
    del groups["activations"], groups["last_activations"]
    _keep(context, groups)
    return reply


@pytest.mark.parametrize(
    "fault", [_lies, pytest.param(_sends_no_weights, marks=pytest.mark.thorough), _explodes]
)
def test_a_round_that_the_server_does_not_count_changes_nothing(
    tmp_path: Path, fault: Callable[[Message, Context, Message], Message]
) -> None:
    """Though the unit has finished it, and learns only later that it did so in vain."""
    seen = watched(tmp_path, *INT4, client=Once(fault))
    assert [line["units"] for line in rounds(tmp_path)] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert [both[1][0].round for both in seen] == [1, 1, 3]
    assert seen[1][1][0].rows is seen[0][1][0].rows
    assert alike(seen)


def _in_round_2(real: Callable[..., Any], fault: Callable[[], None]) -> Callable[..., Any]:
    """Unit 1 does it, in its second round, after this."""
    calls = []

    def then(self: Any, *arguments: Any, **named: Any) -> Any:
        done = real(self, *arguments, **named)
        if threading.current_thread().name == "unit-1":
            calls.append(True)
            if len(calls) == fault_at[real.__name__]:
                fault()
        return done

    return then


def _raise() -> None:
    raise ConnectionResetError("pulled the plug")


def _hang() -> None:
    with pytest.raises(CancelledRoundError):
        while True:
            cancellation.check()
            threading.Event().wait(0.01)


# In rounds of two steps, each of four micro-batches: the first of these in round 2, and so on.
fault_at = {"submit": 10, "exchange_norms": 4, "run_round": 2, "step": 3}


BREAKING = (*INT4, "pipeline.num_micro_batches=4")


@pytest.fixture(scope="module")
def never_began(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[int, Ends]], Tensors]:
    """What is remembered and learned where unit 1 does nothing in round 2."""

    def absent(message: Message, context: Context) -> Message:
        second = message.metadata.group_id == "2"
        if second and context.node_config["partition-id"] == 1:
            raise ValueError("the battery is empty")
        return units(message, context)

    folder = tmp_path_factory.mktemp("absent")
    return watched(folder, *BREAKING, client=absent), weights(folder)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "name", "fault"),
    [
        pytest.param(link.DecoderLink, "submit", _raise, marks=pytest.mark.thorough),
        pytest.param(link.DecoderLink, "exchange_norms", _raise, marks=pytest.mark.thorough),
        (Pipeline, "step", _raise),
        pytest.param(app, "run_round", _raise, marks=pytest.mark.thorough),
        pytest.param(app, "run_round", _hang, marks=pytest.mark.thorough),
    ],
)
def test_a_round_that_breaks_off_changes_nothing(
    tmp_path: Path,
    of: Any,
    name: str,
    fault: Callable[[], None],
    never_began: tuple[list[dict[int, Ends]], Tensors],
) -> None:
    """Wherever it does: the unit goes on as if it had never begun."""
    limit = ("federation.round_timeout_s=8",) if fault is _hang else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, name, _in_round_2(getattr(of, name), fault))
        seen = watched(tmp_path, *BREAKING, *limit)
    late, (expected, learned) = weights(tmp_path), never_began
    assert [line["units"] for line in rounds(tmp_path)][1] == [0, 2]
    assert alike(seen)
    for found, like in zip(seen, expected, strict=True):
        assert all(same(found[unit][0], like[unit][0]) for unit in range(3))
    assert all(torch.equal(late[name], learned[name]) for name in learned)


def test_a_unit_that_lost_its_memory_begins_again(tmp_path: Path) -> None:
    """And takes part in every round."""
    seen = watched(tmp_path, *INT4, client=Once(_forgets))
    assert [line["units"] for line in rounds(tmp_path)] == [[0, 1, 2]] * 3
    assert alike(seen, (0, 2))
    server, unit = seen[-1][1]
    assert server.round == unit.round == 3
    assert unit.rows.keys() <= server.rows.keys()
    assert all(torch.equal(tokens, server.rows[row]) for row, tokens in unit.rows.items())


def test_a_head_that_trains_on_its_unit_leaves_the_memory_alone(tmp_path: Path) -> None:
    options = (*turning(), FEEDBACK, "model.dropout=0")
    seen = watched(tmp_path, *options)
    assert alike(seen)
    for (before, after), heads in zip(
        itertools.pairwise([None, *seen]), places(tmp_path), strict=True
    ):
        for unit, place in enumerate(heads):
            server = after[unit][0]
            was = before[unit][0].round if before else 0
            assert (server.round == was) == (place == "control_unit")


HOSTILE: list[Callable[[Tensor], Tensor]] = [
    lambda numbers: numbers.double(),
    lambda numbers: numbers[:1],
    lambda numbers: torch.full_like(numbers, ~0),
    lambda numbers: torch.full_like(numbers, 2**62),
    lambda numbers: torch.arange(13, 13 + len(numbers)),
    lambda numbers: numbers.maximum(~numbers),  # changes of what was never sent
]


def test_numbers_that_are_no_rows_cost_the_unit_its_round_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lie in each round, then none; the unit's shard has 13 rows."""
    encode = ChangeCoder.encode

    def lying(self: ChangeCoder, *arguments: Any) -> tuple[Tensor, ...]:
        numbers, *parts = encode(self, *arguments)
        mine = threading.current_thread().name == "unit-1" and self.round <= len(HOSTILE)
        return (HOSTILE[self.round - 1](numbers) if mine else numbers, *parts)

    monkeypatch.setattr(ChangeCoder, "encode", lying)
    monkeypatch.setattr(roster, "_LONGEST_PAUSE", 1)  # it may lie in every round
    seen = watched(tmp_path, *INT4, f"federation.rounds={len(HOSTILE) + 1}")
    *lied, last = rounds(tmp_path)
    for line, both in zip(lied, seen, strict=False):
        assert line["units"] == [0, 2]
        assert "INVALID_ARGUMENT" in line["failures"]["1"]
        assert not both[1][0].rows
    assert (len(lied), last["units"]) == (len(HOSTILE), [0, 1, 2])
    assert alike(seen)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        pytest.param("float32", "float64", marks=pytest.mark.thorough),
        ("int4", "float32"),
        pytest.param("float32", "float32", marks=pytest.mark.thorough),
        pytest.param("int8", "float64", marks=pytest.mark.thorough),
    ],
)
def test_planned_bits_are_those_sent(tmp_path: Path, precision: str, dtype: str) -> None:
    """To the byte, in a first epoch; and changes take as many as whole rows."""
    epoch = ("federation.local_steps=1", "federation.rounds=3", "data.max_train_samples=39")
    options = (f"compression.activation={precision}", f"pipeline.dtype={dtype}", *epoch)
    run(tmp_path / "with", *options, FEEDBACK)
    run(tmp_path / "without", *options)
    sent, less = ([line["bytes_up"] for line in rounds(tmp_path / n)] for n in ("with", "without"))
    uplinks = [state.uplink for state in states(tmp_path, *options, FEEDBACK)]
    assert 2 * sum(each.model_bits + each.activation_bits for each in uplinks) == 8 * sum(sent[:2])
    assert len({each - other for each, other in zip(sent, less, strict=True)}) == 1


@pytest.mark.parametrize("alone", ["decoder.mode=control_unit", "framework=vanilla_fl"])
def test_units_that_send_no_activations_have_no_changes_of_them(alone: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compression\.feedback"):
        settings_of(tmp_path, (FEEDBACK, alone))


def test_a_memory_that_is_of_another_model_is_not_restored(tmp_path: Path) -> None:
    settings, settled = settings_of(tmp_path, [*INT4, "federation.rounds=2"])
    grid = grid_of(settings, settled, None)
    train(grid, settings)
    context = next(iter(grid._contexts.values()))
    wide = ActivationMemory(1, {0: torch.zeros(2, settings.model.dim + 1)}).pack()
    before = _kept(context)
    for key in ("activations", "last_activations"):
        message = Message(records.pack_groups({key: wide}), 2, records.RESTORE)
        answer = units(message, context)
        assert "WireError" in answer.content["Failure"]["json"]  # type: ignore[index,operator]
        kept = _kept(context)[key]
        assert all(torch.equal(kept[name], each) for name, each in before[key].items())
