"""A unit's handlers of a masked sum, called by a server that violates the protocol."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from federated import TINY
from flwr.app import ConfigRecord, Context, Message, RecordDict
from masked_sums import RUN, Exchange, drawn
from torch import Tensor

import client_app.app as handlers
from client_app import node
from client_app.app import app
from client_app.round import RoundInputs
from collapipe.config import load_overrides
from collapipe.errors import WireError
from collapipe.plan import ClusterPlan
from collapipe.secure_aggregation.messages import (
    KeysReply,
    KeysRequest,
    Roster,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from collapipe.secure_aggregation.unit import (
    LastMasked,
    MaskedUnit,
    UnitWithKeys,
    UnitWithSurvivors,
)
from collapipe.wire import records
from collapipe.wire.messages import Failure, Setup, TrainRequest

OPTIONS = (
    *TINY,
    "decoder.mode=control_unit",
    "federation.weighting=uniform",
    "federation.checkpoint_every=1",
    "optimizer.state=reset",
    "federation.max_update_norm=null",
    "privacy.clip_norm=1",
    "privacy.secure_aggregation=true",
)
SECRET = "Unit"  # part of each stage's name


@pytest.fixture
def unit() -> Context:
    """Return unit 0 before its first message."""
    own = {"partition-id": 0, "num-partitions": 3}
    setup = Setup(load_overrides(OPTIONS).text, "", {})
    return Context(1, 2, own, records.pack(setup), {})  # type: ignore[arg-type]


def ask(unit: Context, kind: str, content: RecordDict) -> RecordDict:
    return app(Message(content, 2, kind), unit).content


def refuses(unit: Context, kind: str, message: object) -> bool:
    """Return whether the reply is only a failure."""
    content = message if isinstance(message, RecordDict) else records.pack(message)
    return [*ask(unit, kind, content)] == [Failure.__name__]


def secrets(unit: Context) -> list[str]:
    return [name for name in unit.state if SECRET in name]


def masked(round_: int = 1) -> MaskedUnit:
    return Exchange(3, round=round_).share().mask(drawn(3)).with_masks[0]


def confirmations(exchange: Exchange) -> UnmaskRequest:
    """Return the other units' confirmations for unit 0."""
    confirmed = exchange.confirm().confirmed
    return UnmaskRequest(1, {unit: confirmed[unit].confirmations[0] for unit in (1, 2)})


def test_a_unit_confirms_and_reveals_once_and_deletes_its_secrets(unit: Context) -> None:
    exchange = Exchange(3).share().mask(drawn(3))
    records.keep_stage(exchange.with_masks[0], unit.state)
    survivors, confirmed = SurvivorsRequest(1, (0, 1, 2)), confirmations(exchange)
    content = ask(unit, records.SURVIVORS, records.pack(survivors))
    assert records.unpack(SurvivorsReply, content).confirmations.keys() == {1, 2}
    assert secrets(unit) == [UnitWithSurvivors.__name__]
    reply = records.unpack(UnmaskReply, ask(unit, records.UNMASK, records.pack(confirmed)))
    assert reply.shares.keys() == {0, 1, 2}
    assert secrets(unit) == []
    for again in (survivors, SurvivorsRequest(1, (0, 1))):
        assert refuses(unit, records.SURVIVORS, again)
    assert refuses(unit, records.UNMASK, confirmed)


def test_a_unit_reveals_no_shares_after_a_second_list_of_survivors(unit: Context) -> None:
    exchange = Exchange(3).share().mask(drawn(3))
    records.keep_stage(exchange.with_masks[0], unit.state)
    ask(unit, records.SURVIVORS, records.pack(SurvivorsRequest(1, (0, 1, 2))))
    assert refuses(unit, records.SURVIVORS, SurvivorsRequest(1, (0, 1)))
    assert refuses(unit, records.UNMASK, confirmations(exchange))


@pytest.mark.parametrize(
    "request_",
    [
        SurvivorsRequest(1, (1, 2)),
        SurvivorsRequest(1, (0,)),
        SurvivorsRequest(1, (0, 1, 3)),
        SurvivorsRequest(2, (0, 1, 2)),
        SurvivorsRequest(1, tuple(range(20_000))),
        SurvivorsRequest(1, (0, -1)),
    ],
    ids=repr,
)
def test_an_invalid_list_of_survivors_ends_the_units_masked_sum(
    unit: Context, request_: SurvivorsRequest
) -> None:
    records.keep_stage(masked(), unit.state)
    assert refuses(unit, records.SURVIVORS, request_)
    assert secrets(unit) == []
    assert refuses(unit, records.SURVIVORS, SurvivorsRequest(1, (0, 1, 2)))


def test_a_request_for_new_keys_ends_the_current_masked_sum(unit: Context) -> None:
    records.keep_stage(masked(), unit.state)
    first = ask(unit, records.MASK_KEYS, records.pack(KeysRequest(2)))
    assert secrets(unit) == [UnitWithKeys.__name__]
    assert refuses(unit, records.SURVIVORS, SurvivorsRequest(1, (0, 1, 2)))
    again = ask(unit, records.MASK_KEYS, records.pack(KeysRequest(2)))
    one, other = (records.unpack(KeysReply, each).keys for each in (first, again))
    assert one != other


def test_keys_for_the_last_masked_round_or_earlier_are_refused(unit: Context) -> None:
    unit.state.update(records.pack(LastMasked(4)))
    assert all(refuses(unit, records.MASK_KEYS, KeysRequest(round_)) for round_ in (1, 3, 4))
    assert not refuses(unit, records.MASK_KEYS, KeysRequest(5))


def test_a_unit_that_has_not_shared_keys_sends_no_update(unit: Context) -> None:
    """It sends no unmasked update either if the message requests no masks."""
    for state in (None, UnitWithKeys.new(0, RUN, 1), masked()):
        if state is not None:
            records.keep_stage(state, unit.state)
        assert refuses(unit, records.TRAIN, RecordDict({"weights": records.pack_tensors({})}))


def test_a_roster_is_used_once_and_must_have_the_units_keys(unit: Context) -> None:
    others = {n: UnitWithKeys.new(n, RUN, 1).public for n in (1, 2)}
    request = records.pack(KeysRequest(1))
    own = records.unpack(KeysReply, ask(unit, records.MASK_KEYS, request)).keys
    roster = Roster(RUN, 1, {0: own, **others})
    assert not refuses(unit, records.MASK_SHARES, roster)
    assert refuses(unit, records.MASK_SHARES, roster)
    assert secrets(unit) == []
    for keys in (others, {0: others[1], **others}, {0: own}, {0: own, 1: own}):
        ask(unit, records.MASK_KEYS, request)
        assert refuses(unit, records.MASK_SHARES, Roster(RUN, 1, keys))


def test_a_huge_roster_is_refused(unit: Context) -> None:
    ask(unit, records.MASK_KEYS, records.pack(KeysRequest(1)))
    content = records.pack(Roster(RUN, 1, {1: UnitWithKeys.new(1, RUN, 1).public}))
    tree = json.loads(str(content["Roster"]["json"]))  # type: ignore[index, call-overload]
    tree["keys"] = dict.fromkeys(range(20000), tree["keys"]["1"])
    huge = RecordDict({"Roster": ConfigRecord({"json": json.dumps(tree)})})
    assert refuses(unit, records.MASK_SHARES, huge)


def test_a_unit_does_not_send_kept_gradients_to_the_server(unit: Context) -> None:
    gradients = {"embedding.weight/exp_avg": torch.ones(2)}
    for kept in ("optimizer", "residual", "activations", "last_activations"):
        unit.state[kept] = records.pack_tensors(gradients)
    unit.state["stem"] = records.pack_tensors({"kept": torch.ones(2)})
    reply = ask(unit, records.KEEP, records.pack_groups({}))
    assert reply.array_records.keys() == {"stem"}


def test_secrets_are_in_no_checkpoint_and_on_no_disk(unit: Context) -> None:
    exchange = Exchange(3).share().mask(drawn(3)).confirm()
    stages = exchange.with_keys, exchange.with_shares, exchange.with_masks, exchange.with_survivors
    for stage in (each[0] for each in stages):
        records.keep_stage(stage, unit.state)
        unit.state.update(records.pack(LastMasked(1)))
        assert not ask(unit, records.KEEP, records.pack_groups({})).array_records
        texts, groups = records.unpack_kept(unit.state)
        assert texts.keys() == {Setup.__name__, LastMasked.__name__}
        assert groups == {}
        back = records.take_stage(type(stage), unit.state)
        assert back == stage  # as it was packed


def test_a_used_stage_cannot_be_taken_from_an_older_state(unit: Context) -> None:
    """A SuperNode keeps the older state if it does not receive the new one. Masks would then be
    used twice."""
    stage = Exchange(3).share().with_shares[0]
    records.keep_stage(stage, unit.state)
    older = RecordDict(dict(unit.state))
    assert records.take_stage(type(stage), unit.state) == stage
    with pytest.raises(WireError, match="used before"):
        records.take_stage(type(stage), older)


WEIGHTS = {"weight": torch.ones(2)}


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[RoundInputs]:
    """Return the inputs of rounds, which do not train."""
    inputs = list[RoundInputs]()

    def run_round(_: object, given: RoundInputs) -> None:
        inputs.append(given)
        raise WireError("enough")

    monkeypatch.setattr(handlers, "run_round", run_round)
    monkeypatch.setattr(node, "unit_of", lambda *_: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(node, "fixed_parts", lambda *_: None)
    return inputs


def terms(
    began: list[RoundInputs],
    unit: Context,
    clip_norm: float = 1.0,
    weights: dict[str, Tensor] = WEIGHTS,
) -> bytes:
    """Have the unit begin a masked round, and return the terms of its masks."""
    exchange = Exchange(3).share()
    records.keep_stage(exchange.with_shares[0], unit.state)
    request = TrainRequest(1, ClusterPlan(0, (), 1, "gpipe"), 60.0, None, clip_norm=clip_norm)
    content = records.pack(request, weights=records.pack_tensors(weights))
    content.update(records.pack(exchange.requests[0]))
    content.update(records.pack_head_state({"weight/exp_avg_sq": torch.full((2,), 1e30)}))
    ask(unit, records.TRAIN, content)
    assert not began[-1].head_state
    assert began[-1].masks is not None
    return began[-1].masks.terms


def test_masks_depend_on_everything_by_which_a_server_could_have_updates_vanish(
    unit: Context, began: list[RoundInputs]
) -> None:
    setup = records.unpack(Setup, unit.state)
    first = terms(began, unit)
    assert first == terms(began, unit) == records.masked_terms(replace(setup, unit=7), 1.0, WEIGHTS)
    others = [
        terms(began, unit, clip_norm=1e30),
        terms(began, unit, weights={"weight": torch.zeros(2)}),
    ]
    slow = load_overrides([*OPTIONS, "optimizer.lr=1e-30"]).text
    for changed in replace(setup, settings=slow), replace(setup, frozen={"head": "0"}):
        unit.state.update(records.pack(changed))
        others.append(terms(began, unit))
    assert len({first, *others}) == 5


def test_no_optimiser_is_restored_if_updates_are_masked(unit: Context) -> None:
    """Large moments would have the unit's update vanish."""
    moments = {"weight/exp_avg_sq": torch.full((2,), 1e30)}
    assert refuses(unit, records.RESTORE, records.pack_groups({"optimizer": moments}))
    rows = {"kept": torch.zeros(1, dtype=torch.int64)}
    assert not refuses(unit, records.RESTORE, records.pack_groups({"stem": rows}))
