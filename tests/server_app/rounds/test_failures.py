"""Units that raise, hang or diverge: the run continues without them, or it stops with a reason."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import rewritten, run, weights
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from made_request import request_for
from run_files import rounds_of, summary_of
from scripted_units import UNTRAINED, scripted_units
from step_laws import law_of

from client_app import link
from client_app.app import app as client_app
from client_app.control_unit import ControlUnit
from client_app.round import RoundInputs, RoundResult, run_round
from collapipe.errors import (
    CancelledRoundError,
    ConfigError,
    NonFiniteLossError,
    RoundFailedError,
    unit_called,
)
from collapipe.models.transformer import EncoderBlock
from collapipe.plan import ClusterPlan
from collapipe.process import cancellation
from collapipe.report import ClusterReport, DeviceReport, DeviceTrace
from collapipe.runs.model import initial_model, load_model
from collapipe.state import (
    AffineLaw,
    ClusterState,
    DeviceProfile,
    EnergyBudget,
    MemoryBudget,
    Uplink,
    unknown_cluster,
)
from collapipe.step_law import HeldStage
from collapipe.wire import records
from collapipe.wire.messages import Failure, TrainReply
from pipeline.engine import Pipeline
from server_app import questions
from server_app.decoding import heads
from server_app.roster import ABSENT, SILENT, Roster
from server_app.rounds.replies import check_traces, most_traced


class Faulty:
    """A ClientApp, by default the real one, in which these units have a fault in these rounds."""

    def __init__(
        self,
        fault: Callable[[], None],
        units: set[int],
        rounds: set[int],
        app: ClientApp = client_app,
    ) -> None:
        self._fault, self._units, self._rounds, self._app = fault, units, rounds, app

    def __call__(self, message: Message, context: Context) -> Message:
        due = message.metadata.message_type == "train"
        due = due and int(message.metadata.group_id) in self._rounds
        if due and context.node_config["partition-id"] in self._units:
            self._fault()
        return self._app(message, context)


def scripted(
    run_dir: Path, fault: Callable[[], None], units: set[int], rounds: set[int], *options: str
) -> None:
    """Play a run whose units train nothing; ``units`` have a fault in ``rounds``."""
    client = Faulty(fault, units, rounds, scripted_units())
    run(run_dir, *UNTRAINED, *options, client=client)  # type: ignore[arg-type]


def explode() -> None:
    raise ValueError("the battery is empty")


def hang_until_cancelled() -> None:
    while True:
        cancellation.check()
        time.sleep(0.01)


def test_a_unit_that_raises_is_excluded_from_the_round_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(tmp_path / "run", explode, {1}, {1})
    first, second = rounds_of(tmp_path / "run")
    assert first["units"] == [0, 2]
    assert "ValueError: the battery is empty" in first["failures"]["1"]
    assert second["units"] == [0, 1, 2]
    plan = first["plan"]
    queues, waited = plan["queues"], plan["idle_queues"]  # type: ignore[index]
    assert queues[1] < waited[1]
    assert first["queues"] == [queues[0], waited[1], queues[2]]
    assert "round 1: ended without unit 1" in capsys.readouterr().out


def test_a_unit_that_fails_late_has_the_same_effect_as_one_that_never_began(
    tmp_path: Path,
) -> None:
    """The failed unit does not change the weights or the state of an optimiser."""
    never_began = run(tmp_path / "absent", client=Faulty(explode, {1}, {1}))  # type: ignore[arg-type]
    steps = []

    def give_up(pipeline: Pipeline, rate: float, clip_norm: float | None) -> float:
        squared_norm = real(pipeline, rate, clip_norm)
        if "unit-1" in threading.current_thread().name:
            steps.append(rate)
            if len(steps) == 2:  # the last step of round 1, which the server's head has done, too
                explode()
        return squared_norm

    real = Pipeline.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "step", give_up)
        failed_late = run(tmp_path / "late")
    assert rounds_of(tmp_path / "late")[0]["units"] == [0, 2]
    assert all(torch.equal(never_began[name], failed_late[name]) for name in never_began)


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is not set before the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_a_unit_that_hangs_is_cancelled_at_its_next_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(tmp_path / "run", hang_until_cancelled, {2}, {1}, "federation.round_timeout_s=2")
    first, second = rounds_of(tmp_path / "run")
    assert first["units"] == [0, 1]
    assert "no answer in 2 s" in first["failures"]["2"]
    assert second["units"] == [0, 1, 2]
    assert "round 1: ended without unit 2" in capsys.readouterr().out
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("unit")]


def test_a_unit_that_cannot_be_cancelled_delays_no_other_unit(
    tmp_path: Path, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe.flower.inline_grid._GRACE_S", 0.1)

    def wait() -> None:
        never.wait()

    scripted(tmp_path / "run", wait, {0}, {1}, "federation.round_timeout_s=2")
    first, second = rounds_of(tmp_path / "run")
    assert first["units"] == second["units"] == [1, 2]
    assert first["failures"]["0"].startswith("Timeout")
    assert list(second["excluded"]) == ["0"]  # it is asked before the round and is still busy
    stuck = [thread for thread in threading.enumerate() if thread.name.startswith("unit")]
    assert [thread.daemon for thread in stuck] == [True]


def test_a_round_without_any_unit_ends_the_run_with_a_few_causes(tmp_path: Path) -> None:
    """The causes of a thousand units would fill a terminal."""
    five = "federation.num_units=5", "channel.num_channels=5", "strategy=all"
    with pytest.raises(RoundFailedError) as failed:
        scripted(tmp_path / "run", explode, {*range(5)}, {2}, *five)
    place = f"test_failures.py, line {explode.__code__.co_firstlineno + 1}"
    cause = f'ClientApp: "ValueError: the battery is empty ({place})"'
    causes = "; ".join(f"unit {unit}: {cause}" for unit in range(3))
    assert str(failed.value) == f"round 2: every unit failed: {causes} and 2 more"
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["rounds_completed"] == 1
    assert summary["error"] == str(failed.value)


def claims_divergence(app: ClientApp) -> ClientApp:
    """Units 0 and 1 train, but report that their loss is not finite."""

    def claim(message: Message, context: Context) -> Message:
        reply = app(message, context)
        trained = message.metadata.message_type == "train"
        if trained and context.node_config["partition-id"] != 2:
            failure = Failure("NonFiniteLossError", "it is NaN")
            return Message(records.pack(failure), reply_to=message)
        return reply

    return claim  # type: ignore[return-value]


@pytest.mark.parametrize("trains", [True, False], ids=["on the server", "on the units"])
def test_a_unit_that_reports_a_non_finite_loss_is_excluded_from_the_round(
    tmp_path: Path, trains: bool
) -> None:
    """The heads are on the units or on the server; heads on the server have already learned."""
    options, app = ((), client_app) if trains else (UNTRAINED, scripted_units())
    run(tmp_path / "run", *options, client=claims_divergence(app))
    first, second = rounds_of(tmp_path / "run")
    assert first["units"] == second["units"] == [2]
    assert first["failures"] == dict.fromkeys("01", 'NonFiniteLossError: "it is NaN"')


@pytest.mark.parametrize("name", ["check_report", "restore", "noise_variance"])
def test_a_bug_in_the_server_does_not_count_as_a_failure_of_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(f"server_app.rounds.replies.{name}", broken)
    with pytest.raises(KeyError):
        options = *UNTRAINED, "federation.channel_noise=1"
        run(tmp_path / "run", *options, client=scripted_units())


@pytest.mark.parametrize("head", ["per_cluster", "control_unit"])
def test_a_first_step_that_diverges_is_not_blamed_on_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    forward = EncoderBlock.forward

    def infinite(block: EncoderBlock, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return forward(block, hidden, mask) * torch.inf

    monkeypatch.setattr(EncoderBlock, "forward", infinite)
    with pytest.raises(NonFiniteLossError, match=r"step 0: the .*; nothing was trained before, so"):
        run(tmp_path / "run", "federation.rounds=1", f"decoder.mode={head}")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_weights(
    tmp_path: Path,
) -> None:
    diverging = ("optimizer=sgd", "optimizer.lr=1e30", "federation.local_steps=1")
    message = r"unit \d: .*round \d, step [1-9]: the loss is .*; lower optimizer\.lr"
    with pytest.raises(NonFiniteLossError, match=message):
        run(tmp_path / "run", *diverging, "federation.rounds=5")
    done = summary_of(tmp_path / "run")["rounds_completed"]
    kept = weights(tmp_path / "run")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.values())
    settings, _, tokenizer = load_model(tmp_path / "run")
    assert done >= 1
    fresh = initial_model(settings, tokenizer).state_dict()
    assert not torch.equal(
        kept["blocks.0.attention.key.weight"], fresh["blocks.0.attention.key.weight"]
    )


@pytest.mark.parametrize("mode", ["per_cluster", "shared"])
def test_a_unit_that_fails_within_a_step_does_not_disturb_others(tmp_path: Path, mode: str) -> None:
    """The failed unit's stream ends after one micro-batch."""
    real, broken = link.DecoderLink.submit, []

    def submit(self: link.DecoderLink, micro_batch: int, hidden: torch.Tensor) -> None:
        if micro_batch == 1 and not broken:
            broken.append(True)
            raise ConnectionResetError("pulled the plug")
        real(self, micro_batch, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link.DecoderLink, "submit", submit)
        run(tmp_path / "run", f"decoder.mode={mode}")
    first, second = rounds_of(tmp_path / "run")
    assert len(first["units"]) == 2
    assert "pulled the plug" in str(first["failures"])
    assert second["units"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("factor", "kind", "options"),
    [
        (float("nan"), "NonFiniteLossError", ()),
        pytest.param(
            float("inf"),
            "NonFiniteLossError",
            ("decoder.mode=shared",),
            marks=pytest.mark.thorough,
        ),
        (float("nan"), "LinkError", ("compression.activation=int8",)),
        pytest.param(  # not a LinkError
            float("nan"),
            "NonFiniteLossError",
            ("compression.gradient=int8",),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_invalid_activations_exclude_their_unit_from_the_round(
    tmp_path: Path, factor: float, kind: str, options: tuple[str, ...]
) -> None:
    """The server's head learns nothing from them, so the result equals a run without unit 1."""
    real = link.encode

    def hostile(tensor: torch.Tensor, *how: object) -> tuple[torch.Tensor, ...]:
        *quanta, last = real(tensor, *how)  # type: ignore[arg-type]
        bad = "unit-1" in threading.current_thread().name
        return (*quanta, last * factor if bad else last)

    options = *options, "federation.local_steps=1"
    absent = run(tmp_path / "absent", *options, client=Faulty(explode, {1}, {1, 2}))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "encode", hostile)
        found = run(tmp_path / "run", *options)
    for line in rounds_of(tmp_path / "run"):
        assert line["units"] == [0, 2]
        assert line["failures"]["1"].startswith(kind)  # type: ignore[index]
    shared = "decoder.mode=shared" in options  # then the order of steps is the order of arrival
    same = {name for name in absent if not shared or name.startswith("head.")}
    assert all(torch.equal(found[name], absent[name]) for name in same)


def test_a_head_that_moved_too_far_is_excluded_with_its_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = heads.Heads.weights

    def far(self: heads.Heads, unit: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor * (1e6 if unit == 1 else 1) for name, tensor in real(self, unit).items()
        }

    monkeypatch.setattr(heads.Heads, "weights", far)
    run(tmp_path / "run")
    for line in rounds_of(tmp_path / "run"):
        assert line["units"] == [0, 2]
        assert line["failures"]["1"].startswith("OutlyingUpdate")  # type: ignore[index]


def test_a_unit_whose_head_failed_is_excluded_even_if_its_report_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Failure("NonFiniteLossError", "the head's loss is NaN")
    monkeypatch.setattr(heads.Heads, "failure", lambda self, unit: seen if unit == 1 else None)
    run(tmp_path / "run", *UNTRAINED, "federation.rounds=1", client=scripted_units())
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == [0, 2]
    assert line["failures"] == {"1": "NonFiniteLossError: the head's loss is NaN"}


ALONE = "strategy=random", "strategy.num_scheduled=1", "federation.rounds=9"


def test_a_failure_of_a_rounds_only_unit_skips_the_round(tmp_path: Path) -> None:
    scripted(tmp_path / "run", explode, {1}, {*range(10)}, *ALONE)
    metrics = rounds_of(tmp_path / "run")
    chosen = [line["plan"]["clusters"][0]["unit"] for line in metrics]  # type: ignore[index]
    assert {*chosen} == {0, 1, 2}
    assert [line["units"] for line in metrics] == [[] if unit == 1 else [unit] for unit in chosen]
    assert all(bool(line["skipped"]) == (not line["units"]) for line in metrics)


def test_the_run_ends_after_every_unit_has_failed_alone(tmp_path: Path) -> None:
    begun = {*range(2, 10)}
    with pytest.raises(RoundFailedError) as failed:
        scripted(tmp_path / "run", explode, {0, 1, 2}, begun, *ALONE)
    assert all(f"unit {unit}: ClientApp" in str(failed.value) for unit in range(3))
    assert [bool(line["skipped"]) for line in rounds_of(tmp_path / "run")][:2] == [False, True]


@pytest.mark.parametrize(
    "strategy", ["channel.num_channels=1", "strategy=loss_only strategy.num_scheduled=1"]
)
def test_a_failing_unit_that_is_always_chosen_is_suspended_ever_longer(
    tmp_path: Path, strategy: str
) -> None:
    """The failing unit's queue grows, and a missing loss counts as the highest loss.

    These strategies would therefore always choose the unit.
    """
    options = *strategy.split(), "federation.rounds=12", "federation.local_steps=1"
    scripted(tmp_path / "run", explode, {1}, {*range(99)}, *options)
    metrics = rounds_of(tmp_path / "run")
    rests = [line["round"] for line in metrics if line["excluded"]]
    failed = [line["round"] for line in metrics if line["failures"]]
    assert sum(not line["units"] for line in metrics) == len(failed) <= 4
    excluded = [str(line["excluded"]) for line in metrics if line["excluded"]]
    assert all("suspended until round" in each for each in excluded)
    assert len(rests) > len(failed)
    assert not {*rests} & {*failed}


def test_failing_units_are_suspended_unless_no_unit_would_remain() -> None:
    failures, absent = {1: Failure("WireError", "it lies")}, Failure(ABSENT, "gone")
    both = roster = Roster((unknown_cluster(0), unknown_cluster(1)))
    rests = []
    for round_ in (1, 2, 4, 8, 16, 32, 64, 96):
        roster = roster.after_failures(round_, failures, {0})
        rests.append(roster.failed[1].until - round_ - 1)
    assert rests == [0, 1, 3, 7, 15, 31, 31, 31]
    assert roster.resting(97).keys() == {1}
    assert not roster.updated({0: absent}).resting(97) and not roster.updated({1: absent}).resting(
        97
    )
    assert roster.after_failures(128, {}, {0, 1}) == both
    silent = both.after_failures(1, {1: Failure(SILENT, "")}, {})
    assert not silent.failed
    silent.check(1, unit_called)
    with pytest.raises(RoundFailedError, match="unit 1: Timeout"):
        silent.updated({0: absent}).check(1, unit_called)


def test_a_run_without_a_finished_round_saves_the_untrained_model(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError):
        scripted(tmp_path / "run", explode, {0, 1, 2}, {1})
    settings, model, tokenizer = load_model(tmp_path / "run")
    fresh = initial_model(settings, tokenizer).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())


def test_a_run_whose_port_is_taken_fails_before_it_writes_or_asks(tmp_path: Path) -> None:
    asked = list[str]()

    def client(message: Message, context: Context) -> Message:
        asked.append(message.metadata.message_type)
        return client_app(message, context)

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"link.port={other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"link\.port=.*: cannot listen"):
            run(tmp_path / "run", port, client=client)  # type: ignore[arg-type]
    assert asked == []
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", *UNTRAINED, port, "federation.rounds=1", client=scripted_units())


def test_a_head_that_is_not_finite_stops_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = heads.Heads.weights

    def poisoned(self: heads.Heads, unit: int) -> dict[str, torch.Tensor]:
        return {name: tensor / 0 - tensor / 0 for name, tensor in real(self, unit).items()}

    monkeypatch.setattr(heads.Heads, "weights", poisoned)
    with pytest.raises(NonFiniteLossError, match=r"round 1: head\.\S+ is NaN or infinite"):
        run(tmp_path / "run")
    assert all(bool(torch.isfinite(t).all()) for t in weights(tmp_path / "run").values())


def test_a_run_that_diverges_in_its_last_step_has_the_status_failed(tmp_path: Path) -> None:
    once = ("federation.rounds=1", "federation.local_steps=1")
    with pytest.raises(NonFiniteLossError):
        run(tmp_path / "run", *once, "optimizer=sgd", "optimizer.lr=1e25")
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)


@pytest.mark.parametrize("framework", ["collapipe", "vanilla_fl"])
def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path, framework: str) -> None:
    """Gradients cannot be clipped by a norm that is NaN."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan

    real = EncoderBlock.forward

    def forward(self: EncoderBlock, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = real(self, hidden, mask)
        if output.requires_grad:
            output.register_hook(poison)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncoderBlock, "forward", forward)
        with pytest.raises(
            NonFiniteLossError, match=r"unit 0: .*round 1, step 0: the gradients' norm"
        ):
            run(tmp_path / "run", f"framework={framework}", "federation.num_units=1")


def test_an_unexpected_error_is_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("server_app.rounds.global_model.average", broken)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", *UNTRAINED, client=scripted_units())
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["error"]) == ("failed", "ZeroDivisionError: a bug")


@pytest.mark.parametrize("last", ["step", "weights"])
def test_a_shared_head_discards_a_round_in_which_a_unit_failed(
    tmp_path: Path, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Units step the same head in turn, so a failed unit's steps can be discarded only together
    with the others' steps; a warning says so. The unit may fail in a step or after the last one."""
    once = ("decoder.mode=shared", "federation.rounds=1")
    real = getattr(Pipeline, last)

    def give_up(pipeline: Pipeline, *arguments: object) -> object:
        done = real(pipeline, *arguments)
        if "unit-1" in threading.current_thread().name:
            explode()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, last, give_up)
        trained = run(tmp_path / "run", *once)
    settings, _, tokenizer = load_model(tmp_path / "run")
    fresh = initial_model(settings, tokenizer).state_dict()
    moved = {name for name, tensor in fresh.items() if not torch.equal(tensor, trained[name])}
    assert moved == {name for name in fresh if not name.startswith("head.")}
    assert "the head learned nothing in this round" in caplog.text


def test_a_reply_after_the_timeout_leaves_no_state_on_the_unit(tmp_path: Path) -> None:
    """The server discards it, so the unit must not continue from its optimiser's new state."""
    late = []

    def too_late(unit: ControlUnit, inputs: RoundInputs) -> RoundResult:
        finished = run_round(unit, inputs)
        if "unit-2" in threading.current_thread().name and not late:
            late.append(True)
            with pytest.raises(CancelledRoundError):
                hang_until_cancelled()
        return finished

    options = "federation.round_timeout_s=5", "federation.local_steps=1", "model.num_blocks=2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("client_app.app.run_round", too_late)
        given_up = run(tmp_path / "late", *options)
    absent = run(tmp_path / "absent", *options, client=Faulty(explode, {2}, {1}))  # type: ignore[arg-type]
    assert all(torch.equal(given_up[name], absent[name]) for name in absent)


def reports(**fields: object) -> Callable[[Message], None]:
    """Return a function that replaces these fields of a unit's report."""

    def lie(reply: Message) -> None:
        with rewritten(reply) as decoded:
            decoded["report"] |= fields

    return lie


def renames_a_weight(reply: Message) -> None:
    """Rename a unit's first weight."""
    sent = records.unpack_record(reply.content, "weights")
    sent["\x1b[31m" + "x\n" * 9999] = sent.pop(next(iter(sent)))
    reply.content["weights"] = records.pack_tensors(sent)


def claims_the_next_number(reply: Message) -> None:
    """Reply with the next unit's number, also in the state."""
    with rewritten(reply) as decoded:
        state = json.loads(decoded["state"])
        decoded["unit"] += 1
        decoded["state"] = json.dumps(state | {"unit": decoded["unit"]})


def truncates_weights(reply: Message) -> None:
    """Cut the last byte off a unit's weights."""
    (array,) = reply.content.array_records["weights"].values()
    array.data = array.data[:-1]


def traces(steps: int, actions: int) -> list[object]:
    """Traces of one device."""
    return [{"name": "x", "error_s": 0, "steps": [[[0] * 4] * actions] * steps}]


LIES = [
    reports(seconds={"a": 1e999}),
    reports(seconds={"a": -1.0}),
    reports(seconds={"a": 9e99}),
    reports(losses=[9e99, 1.0]),
    reports(seconds={str(phase): 0.0 for phase in range(33)}),
    reports(seconds={"\x1b[2J": 0.0}),
    reports(seconds={"x" * 65: 0.0}),
    reports(losses=[float("nan"), 1.0]),
    reports(losses=[1.7e308, 1.7e308]),
    reports(samples=10**400),
    reports(samples=13),
    reports(stem_rows=13),
    reports(target_tokens=10**15),
    reports(input_tokens=10**15),
    reports(link_bytes_up=-5),
    reports(link_bytes_down=2**62),
    truncates_weights,
    renames_a_weight,
    claims_the_next_number,
    reports(traces=traces(1, 1 + 5 * 2 * 2 * 2)),  # 1 + stages · steps · micro-batches · kinds
    reports(traces=traces(20, 8000)),
]


def test_false_replies_exclude_only_their_units_from_the_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last unit is honest. The server has no heads, so it cannot check counts itself."""

    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        unit = int(context.node_config["partition-id"])
        if message.metadata.message_type == "train" and unit < len(LIES):
            LIES[unit](reply)
        return reply

    options = (f"federation.num_units={len(LIES) + 1}", "federation.rounds=1")
    options += ("strategy=all", *UNTRAINED)
    run(tmp_path / "run", *options, client=lying)  # type: ignore[arg-type]
    (first,) = rounds_of(tmp_path / "run")
    assert first["units"] == [len(LIES)]
    causes = first["failures"]
    messages = ["impossible for its round"] * 16 + ["cannot be read", "other weights"]
    messages += ["a report"]
    messages += ["41 actions of devices, expected at most 40", "bytes of JSON, at most 1,0"]
    assert all(words in causes[str(unit)] for unit, words in enumerate(messages))
    assert all(cause.isprintable() and len(cause) < 500 for cause in causes.values())
    assert "\x1b" not in capsys.readouterr().out


def test_a_unit_is_named_if_its_next_devices_cannot_be_planned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its update is averaged. It trains again once it reports possible devices."""
    honest = scripted_units()

    def lying(message: Message, context: Context) -> Message:
        reply, kind = honest(message, context), message.metadata.message_type
        if kind == "train" and int(context.node_config["partition-id"]) == 1:
            with rewritten(reply) as decoded:
                state = json.loads(decoded["state"])
                decoded["state"] = json.dumps(state | {"num_samples": -1})
        return reply

    options = "federation.num_units=2", "federation.rounds=1", "strategy=all", *UNTRAINED
    run(tmp_path / "run", *options, client=lying)  # type: ignore[arg-type]
    (line,) = rounds_of(tmp_path / "run")
    assert line["units"] == [0, 1]
    assert "round 1: unit 1 is excluded until it reports devices" in caplog.text
    assert "num_samples" in caplog.text


def test_the_longest_valid_reply_of_a_round_is_accepted() -> None:
    """The reply has all parts, and its numbers and texts are as long as possible. All devices
    compute, because more devices than blocks can share segments."""
    low, high, quotes = -1.2345678901234567e-123, 1.2345678901234567e17, '"' * 60
    law, memory = AffineLaw(*[1.2345678901234567e-15] * 4), MemoryBudget(*[high] * 4)
    budgets = EnergyBudget(high, law, "micro_batch"), memory
    devices = [DeviceProfile(f"{quotes}{k}", law, 10**18, *budgets) for k in range(128)]
    uplink = Uplink(*[high] * 4, (high,) * 20_000)
    names = [each.name for each in devices]
    step = law_of(names, m=4096, apart=True, cores=4096, send_s=1.2345678901234567e-15)
    stages = HeldStage((*names,), 4096, (2**31 - 1,) * len(names))
    times = {k: replace(t, launch_s=1.2345678901234567e-15) for k, t in step.devices.items()}
    step = replace(step, stages=(stages,), devices=times, factor=1.2345678901234567e-5)
    state = ClusterState(7, tuple(devices), 10**18, uplink, step=step)
    plan, steps = ClusterPlan(7, (), 2, "one_f_one_b"), 3
    request = request_for([state], 2, 6, 2, local_steps=steps)
    actions = ((low,) * 4,) * 2 * 2
    report = ClusterReport(
        *(7, (low,) * steps, 10**15, 10**15, {f"{phase:064}": high for phase in range(32)}),
        *(2**61, 2**61, (low,) * steps),
        devices=tuple(DeviceReport(each.name, 10**6, *[high] * 7) for each in devices),
        events=('"' * 600,) * 100,
        input_tokens=10**15,
        traces=tuple(
            DeviceTrace(name, high, (actions,) * steps, "embedding")
            for name in (*names, "control unit", "control unit")
        ),
    )
    content, most = records.pack_reply(TrainReply({}, report, state)), most_traced(plan, request)
    arrays = {records.WEIGHTS: questions.tensors_bytes({})}
    questions.check_size(content, questions.train(steps, most, arrays).size)
    unpacked = records.unpack_reply(content)
    check_traces(unpacked.report, most)
    assert (unpacked.report, unpacked.state) == (report, state)
    content = records.pack_state(state, [])
    questions.check_size(content, questions.STATE.size)
    assert records.unpack_state(content).state == state
