"""The scheduler: strategies see the same world, plans repeat, units and rounds can be left out."""

import gzip
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from federated import rewritten, run, settings_of
from flwr.app import Context, Message, RecordDict
from pydantic import TypeAdapter
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units
from step_laws import law_of, stages_of

from collapipe.config import Settings
from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import Certificate, RoundPlan, Span
from collapipe.report import BENCHMARKED, ClusterReport, RoundingErrors, RoundReport
from collapipe.seeds import derive
from collapipe.state import (
    AffineLaw,
    ClusterState,
    DeviceProfile,
    Estimates,
    Payload,
    Precision,
    SharingLaw,
    Uplink,
)
from collapipe.wire.messages import Failure
from optim.baselines import EvenSplit
from optim.planner import RoundRequest
from optim.round.convergence import idle_gamma
from server_app.planning.estimates import RoundObservation
from server_app.planning.reported import same_cluster
from server_app.planning.scheduler import RoundDecision, Scheduler, Trained
from server_app.records.run_log import REQUESTS
from server_app.roster import Reported

MOBILE = (
    "environment=mobile",
    "cluster=paper",
    "channel=paper",
    "federation.num_units=4",
    "channel.num_channels=2",
    "channel.energy_j=1.0e3",
    "federation.on_infeasible=skip",
)
FAST = ("federation.rounds=3", *UNTRAINED)
_REQUEST = TypeAdapter(RoundRequest)


def cluster(unit: int, speed: float = 1.0) -> ClusterState:
    devices = tuple(
        DeviceProfile(f"d{k}", AffineLaw(speed * (k + 1) / 100, 0.01, 0.0, 0.02), max_blocks=4)
        for k in range(3)
    )
    return ClusterState(unit, devices, 10, Uplink(0.5, 10.0, 1e6, 1e6, (0.9, 0.8)))


class Rounds:
    """A scheduler and its state after the last round."""

    def __init__(self, settings: Settings, reported: Sequence[Reported]) -> None:
        self._scheduler = Scheduler(settings)
        self.state = self._scheduler.begin(reported)

    def decide(self, round_: int) -> RoundDecision:
        return self._scheduler.decide(self.state, round_)

    def end(
        self,
        decision: RoundDecision,
        losses: Mapping[int, float],
        measured_s: float = 0.0,
        **trained: Any,
    ) -> RoundReport:
        results = Trained(losses, **trained)
        self.state, report = self._scheduler.end(self.state, decision, results, measured_s)
        return report


def scheduler(tmp_path: Path, *overrides: str, units: int = 4) -> Rounds:
    settings = settings_of(tmp_path / "unused", [*MOBILE, *overrides])
    return Rounds(settings, [cluster(unit, 1 + unit / 4) for unit in range(units)])


def play(scheduler: Rounds, rounds: int) -> list[RoundDecision]:
    decisions = []
    for number in range(1, rounds + 1):
        decisions.append(scheduler.decide(number))
        taken = [each.unit for each in decisions[-1].plan.clusters]
        scheduler.end(decisions[-1], dict.fromkeys(taken, 1.0))
    return decisions


def test_every_strategy_sees_the_same_world(tmp_path: Path) -> None:
    """Replaying 10 rounds through each strategy is a paired comparison."""
    strategies = ("dssra", "random", "loss_only", "delay_only", "all")
    worlds = []
    for strategy in strategies:
        decisions = play(scheduler(tmp_path, f"strategy={strategy}"), 10)
        worlds.append([(each.request.clusters, each.request.channels) for each in decisions])
    assert all(world == worlds[0] for world in worlds[1:])
    assert len({repr(world) for world in worlds[0]}) == 10  # the world changes in every round


class Changing:
    """A strategy that changes another one's plans."""

    def __init__(self, change: Callable[[RoundPlan], object]) -> None:
        self._change = change

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> object:
        return self._change(EvenSplit().plan_round(request, rng))


def changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[RoundPlan], object]
) -> RoundPlan:
    """The plan of round 1 by a strategy with this change."""
    monkeypatch.setattr(Settings, "planner", property(lambda settings: Changing(change)))
    return scheduler(tmp_path).decide(1).plan


def of_first(plan: RoundPlan, **changes: object) -> RoundPlan:
    first, *others = plan.clusters
    return replace(plan, clusters=(replace(first, **changes), *others))  # type: ignore[arg-type]


def test_a_plan_may_contain_numpy_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler converts them, because records cannot hold them."""
    kept = list[RoundPlan]()

    def change(plan: RoundPlan) -> RoundPlan:
        kept.append(plan)
        first = plan.clusters[0]
        unit, m = np.int64(first.unit), np.int64(first.num_micro_batches)
        return of_first(plan, unit=unit, num_micro_batches=m)

    found = changed(tmp_path, monkeypatch, change)
    assert [found] == kept and type(found.clusters[0].unit) is int


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: [plan], "returned list, expected RoundPlan"),
        (lambda plan: Span(0, -8), ": a span of -8 blocks from block 0 is impossible"),
        (lambda plan: replace(plan, queues=(math.nan,) * 4), "queues[0]: must be a finite number"),
        (lambda plan: replace(plan, queues=(-1.0,) * 4), "queues[0]: must be at least 0"),
        (lambda plan: of_first(plan, latency_s=math.nan), "clusters[0].latency_s: must be"),
        (
            lambda plan: replace(plan, certificate=Certificate(1.0, 1.0, "own", math.inf)),
            "certificate.solve_time_s: must be a finite number",
        ),
        (lambda plan: replace(plan, certificate={}), "certificate.objective is missing"),
        (lambda plan: of_first(plan, unit=object()), "no attribute 'tolist'"),
        (lambda plan: of_first(plan, unit=np.ones(2)), "clusters[0].unit: must be a whole number"),
        (lambda plan: of_first(plan, latency_s="soon"), "clusters[0].latency_s: must be a number"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_name_of_its_strategy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[RoundPlan], object],
    message: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(tmp_path, monkeypatch, change)
    assert str(refused.value).startswith("strategy: Changing.plan_round")
    assert message in str(refused.value)


def test_a_round_without_a_scheduled_unit_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Changing(lambda plan: replace(plan, clusters=()))
    monkeypatch.setattr(Settings, "planner", property(lambda settings: planner))
    assert scheduler(tmp_path).decide(1).skipped == "the strategy scheduled no unit"


@pytest.mark.parametrize("law", ["latency", "fading", "uplink"])
def test_an_unknown_law_of_a_users_strategy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, law: str
) -> None:
    planner = Changing(lambda plan: plan)
    setattr(planner, law, "flowshop")
    monkeypatch.setattr(Settings, "planner", property(lambda settings: planner))
    with pytest.raises(ConfigError, match=rf"strategy\.{law}=flowshop: must be one of "):
        scheduler(tmp_path)


def test_another_strategy_can_plan_a_logged_round_with_its_channels(tmp_path: Path) -> None:
    decisions = play(scheduler(tmp_path, "strategy=dssra"), 5)
    settings = settings_of(tmp_path / "unused", [*MOBILE, "strategy=random"])
    planner = settings.build("strategy")
    for decision in decisions:
        rng = np.random.default_rng(decision.plan.round)
        again = planner.plan_round(decision.request, rng)
        assert len(again.clusters) == len(decision.plan.clusters) == 2
        assert {each.uplink.channel for each in again.clusters} == {0, 1}


def test_planning_again_from_the_log_of_a_run_gives_its_plans(tmp_path: Path) -> None:
    """A direct call of the planner on the logged request gives the run's plan."""
    overrides = (*MOBILE, *FAST)
    run(tmp_path / "run", *overrides, client=scripted_units())
    settings = settings_of(tmp_path / "run", overrides)
    planner = settings.build("strategy")
    lines = rounds_of(tmp_path / "run")
    requests = gzip.decompress((tmp_path / "run" / REQUESTS).read_bytes()).splitlines()
    assert len(requests) == len(lines) == 3
    for line, text in zip(lines, requests, strict=True):
        rng = np.random.default_rng(derive(settings.seed, "plan", line["round"]))
        plan = planner.plan_round(_REQUEST.validate_json(text), rng)
        logged = line["plan"]
        assert [each["unit"] for each in logged["clusters"]] == [e.unit for e in plan.clusters]
        for was, is_ in zip(logged["clusters"], plan.clusters, strict=True):
            assert was["latency_s"] == is_.latency_s
            assert is_.uplink is not None
            assert was["uplink"]["power_w"] == is_.uplink.power_w
            held = [(s["device"], s["span"]["blocks"]) for s in was["segments"]]
            assert held == [(s.device, s.span.blocks) for s in is_.segments]
        assert logged["queues"] == list(plan.queues)


def test_the_clock_adds_the_delays_of_rounds(tmp_path: Path) -> None:
    own = scheduler(tmp_path)
    decisions = play(own, 10)
    assert own.state.clock_s == pytest.approx(sum(each.cost.delay_s for each in decisions))
    real = scheduler(tmp_path, "federation.clock=real")
    real.end(real.decide(1), {}, 2.5)
    assert real.state.clock_s == 2.5


def test_the_clock_adds_the_seconds_of_sending_states_for_a_checkpoint(tmp_path: Path) -> None:
    """Units outside the plan send their states, too. A measured time already includes these
    seconds."""
    own, real = scheduler(tmp_path), scheduler(tmp_path, "federation.clock=real")
    decision = own.decide(1)
    report = own.end(decision, {}, 2.5, kept_bytes=dict.fromkeys(range(4), 10**6))
    assert report.checkpoint_bytes == 4 * 10**6 and report.checkpoint_s > 0
    assert report.clock_s == decision.cost.delay_s + report.checkpoint_s
    assert real.end(real.decide(1), {}, 2.5, kept_bytes={0: 10**6}).clock_s == 2.5


def test_a_round_that_no_unit_can_afford_is_skipped_and_all_queues_grow(tmp_path: Path) -> None:
    poor = [replace(cluster(unit), uplink=Uplink(0.5, 1e-9, 1e6, 0, (0.9, 0.8))) for unit in (0, 1)]
    overrides = [*MOBILE, "environment=static", "federation.num_units=2"]
    settings = settings_of(tmp_path / "unused", overrides)
    own = Rounds(settings, poor)
    first, second = play(own, 2)
    assert first.plan.clusters == second.plan.clusters == ()
    assert "energy" in str(first.skipped)
    grown = idle_gamma(first.request.channels, settings.build("strategy")) - 0.84
    assert own.state.queues == pytest.approx((2 * grown, 2 * grown))
    assert own.state.clock_s == 0
    settings = settings_of(tmp_path / "unused", [*overrides, "federation.on_infeasible=stop"])
    with pytest.raises(InfeasibleRoundError, match=r"^round 1: "):
        Rounds(settings, poor).decide(1)


def test_a_plan_without_idle_queues_sets_the_queues_even_if_units_fail(
    tmp_path: Path,
) -> None:
    own = scheduler(tmp_path, "strategy=random")
    decision = own.decide(1)
    queues = (1.0, 2.0, 3.0, 4.0)
    own.end(replace(decision, plan=replace(decision.plan, queues=queues)), {})
    assert own.state.queues == queues


def test_only_a_planned_unit_that_failed_gets_its_idle_queue(tmp_path: Path) -> None:
    own = scheduler(tmp_path)
    decision = own.decide(1)
    finished, failed = (each.unit for each in decision.plan.clusters)
    own.end(decision, {finished: 1.0})
    waiting = {failed: decision.plan.idle_queues[failed]}
    expected = [waiting.get(unit, queue) for unit, queue in enumerate(decision.plan.queues)]
    assert list(own.state.queues) == expected
    assert expected != list(decision.plan.queues)
    assert [loss is None for loss in own.state.losses] == [unit != finished for unit in range(4)]


def test_with_noise_the_state_ignores_values_that_units_measured(tmp_path: Path) -> None:
    """The values are losses, gradients and rounding errors; without noise, the state has them."""
    for options in ("privacy=private",), ():
        own = scheduler(tmp_path, *options)
        decision = own.decide(1)
        measured = {
            each.unit: ClusterReport(
                each.unit, (1.0,), 1, 1, rounding=RoundingErrors({"int4": 1}, {})
            )
            for each in decision.plan.clusters
        }
        observation = RoundObservation(1.0, 1.0, 1.0)
        losses = dict.fromkeys(measured, 1.0)
        own.end(decision, losses, reports=measured, observation=observation)
        found = own.state
        noisy = bool(options)
        assert all(loss is None for loss in found.losses) == noisy
        assert (found.observation is None) == (found.estimates == Estimates()) == noisy
        assert all(each == RoundingErrors() for each in found.rounding) == noisy


def test_a_strategy_that_changes_its_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(request: RoundRequest) -> RoundRequest:
        object.__setattr__(request.clusters[0].devices[0], "max_blocks", None)
        return request

    strategy = Changing(lambda plan: plan)
    planned = strategy.plan_round
    strategy.plan_round = lambda request, rng: planned(limit(request), rng)
    monkeypatch.setattr(Settings, "planner", strategy)
    with pytest.raises(ConfigError, match=r"^strategy: Changing\.plan_round: changed its request"):
        scheduler(tmp_path).decide(1)


@dataclass(frozen=True)
class WithoutPlan:
    """A strategy whose author forgot to return a plan."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> None:
        pass


def test_a_strategy_that_returns_no_plan_is_refused(tmp_path: Path) -> None:
    own = scheduler(tmp_path, "strategy=even", f"strategy._target_={__name__}.WithoutPlan")
    with pytest.raises(ConfigError, match="NoneType"):
        own.decide(1)


def test_the_cost_of_a_round_uses_the_law_and_the_fading_of_its_strategy(tmp_path: Path) -> None:
    fixed = ("strategy=all", "environment=static", "federation.num_units=2")
    fixed += ("strategy.partition=pipeline", "pipeline.num_micro_batches=3")
    delays = [
        scheduler(tmp_path, *fixed, *options, units=2).decide(1).cost
        for options in ((), ("strategy.latency=bound",), ("strategy.fading=rayleigh",))
    ]
    plain, bound, fading = (
        (max(c.pipeline_s for c in cost.clusters), max(c.upload_s or 0 for c in cost.clusters))
        for cost in delays
    )
    assert bound[0] > plain[0] == fading[0]
    assert fading[1] > plain[1] == bound[1]


@pytest.mark.parametrize(
    "nonsense",
    [
        Failure("WireError", "not a ClusterState: devices.0.time.u: NaN"),
        replace(cluster(1), uplink=Uplink(0.5, 10.0, 1e6, 1e6, (0.9,))),
    ],
)
def test_a_unit_with_an_invalid_report_is_excluded_until_a_valid_report(
    tmp_path: Path, nonsense: ClusterState | Failure
) -> None:
    settings = settings_of(tmp_path / "unused", [*MOBILE, "environment=static"])
    own = Rounds(settings, [cluster(0), nonsense, cluster(2), cluster(3)])
    for decision in play(own, 6):
        assert list(decision.excluded) == [1]
        assert 1 not in {each.unit for each in decision.plan.clusters}
        assert len(decision.plan.clusters) == 2
    assert own.state.queues[1] == max(own.state.queues)
    own.state = replace(own.state, roster=own.state.roster.updated({1: cluster(1)}))
    decision = own.decide(7)
    assert decision.excluded == {}
    assert 1 in {each.unit for each in decision.plan.clusters}  # its queue is the longest


def offering(unit: int, energy_j: float = 10.0) -> ClusterState:
    """A cluster whose exact payload has 1,000 times the bits of its coarse one."""
    exact, coarse = (
        Payload("float32", "float32", 1e8, 1e8, 0.0),
        Payload("int4", "int4", 1e5, 1e5, 3e-3),
    )
    payloads = exact, coarse
    uplink = Uplink(0.5, energy_j, *exact.bits, (0.9, 0.8), payloads=payloads)
    return replace(cluster(unit), uplink=uplink)


def offered(tmp_path: Path, energy_j: float = 10.0, *options: str) -> Rounds:
    world = "environment=static", "compression=auto", "federation.num_units=2"
    overrides = [*MOBILE, *world, *options]
    settings = settings_of(tmp_path / "unused", overrides)
    return Rounds(settings, [offering(unit, energy_j) for unit in (0, 1)])


def test_a_failed_unit_adds_no_rounding_error_to_its_queue(tmp_path: Path) -> None:
    own = offered(tmp_path)
    play(own, 1)
    assert own.state.error_queues == pytest.approx((2.0, 2.0))  # error 3e-3, budget 1e-3
    decision = own.decide(2)
    assert len(decision.plan.clusters) == 2
    report = own.end(decision, {0: 1.0})
    assert own.state.error_queues == pytest.approx((decision.plan.error_queues[0], 1.0))
    assert report.error_queues == own.state.error_queues
    first = offered(tmp_path)
    first.end(first.decide(1), {1: 1.0})
    assert first.state.error_queues == pytest.approx((0.0, 2.0))


def test_plans_use_the_rounding_errors_that_units_measured(tmp_path: Path) -> None:
    """The next round uses the errors of units that measured them. The exact payload stays exact
    and first."""
    own = offered(tmp_path)
    found = RoundingErrors({"int4": 0.25}, {"int4": 0.5, "int8": 2.0})
    measured = ClusterReport(0, (1.0,), 1, 1, rounding=found)
    unknown = ClusterReport(1, (1.0,), 1, 1)
    reported = {0: measured, 1: unknown}
    report = own.end(own.decide(1), {0: 1.0, 1: 1.0}, reports=reported)
    assert report.rounding == {0: found}
    first, second = own.decide(2).request.clusters
    assert [p.gradient_error for p in first.uplink.payloads] == [0.0, 0.75]
    benchmarked = BENCHMARKED.activation["int4"] + BENCHMARKED.upload["int4"]
    assert [p.gradient_error for p in second.uplink.payloads] == [0.0, benchmarked]
    again = ClusterReport(0, (1.0,), 1, 1, rounding=RoundingErrors({}, {"int4": 0.125}))
    own.end(own.decide(3), {0: 1.0}, reports={0: again})
    first, _ = own.decide(4).request.clusters
    assert [p.gradient_error for p in first.uplink.payloads] == [0.0, 0.375]
    assert own.state.roster == offered(tmp_path).state.roster  # units' reports stay


@pytest.mark.parametrize("error", [1e-300, 1e-19, 0.0, 1e17])
def test_no_reported_rounding_error_ends_the_run(tmp_path: Path, error: float) -> None:
    """A reported error of float32 is ignored."""
    own = offered(tmp_path)
    errors = dict.fromkeys(get_args(Precision), error)
    report = ClusterReport(0, (1.0,), 1, 1, rounding=RoundingErrors(errors, errors))
    own.end(own.decide(1), {0: 1.0}, reports={0: report})
    first, _ = own.decide(2).request.clusters
    assert [p.activation for p in first.uplink.payloads] == ["float32", "int4"]
    assert [p.gradient_error for p in first.uplink.payloads] == [0.0, 1.0 if error > 1 else 0.0]


def test_a_units_measured_rounding_error_decides_its_precision(tmp_path: Path) -> None:
    """The error budget of each round is 0.001."""
    own = offered(tmp_path, 1e9, "strategy=all")

    def after(error: float) -> dict[int, str]:
        rounding = RoundingErrors({"int4": error / 2}, {"int4": error / 2})
        report = ClusterReport(0, (1.0,), 1, 1, rounding=rounding)
        own.end(own.decide(1), {0: 1.0}, reports={0: report})
        return {each.unit: each.uplink.activation for each in own.decide(2).plan.clusters}

    assert after(3e-3) == {0: "float32", 1: "float32"}
    assert after(9e-4) == {0: "int4", 1: "float32"}
    assert after(2e-3) == {0: "float32", 1: "float32"}


def test_a_strategy_that_chooses_no_payload_is_refused_with_the_options_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "planner", property(lambda settings: EvenSplit()))
    message = r"^compression\.activation=auto, compression\.upload=auto: the strategy chose nothing"
    with pytest.raises(ConfigError, match=message):
        offered(tmp_path, 1e9).decide(1)


def test_a_skipped_round_reduces_the_error_queues(tmp_path: Path) -> None:
    own = offered(tmp_path, energy_j=1e-12)
    own.state = replace(own.state, error_queues=(2.5, 0.5))
    decision = own.decide(1)
    assert decision.skipped
    own.end(decision, {})
    assert own.state.error_queues == (1.5, 0.0)


@pytest.mark.parametrize(
    ("options", "invalid"),
    [
        ((), offering(1)),
        (("compression=auto",), cluster(1)),
        (("compression.activation=auto",), offering(1)),
        (("compression.upload=auto",), offering(1)),
    ],
)
def test_a_unit_that_offers_other_payloads_than_requested_is_excluded(
    tmp_path: Path, options: tuple[str, ...], invalid: ClusterState
) -> None:
    """Such a unit must not override the configuration and must not end the run of other units."""
    overrides = [*MOBILE, "environment=static", "federation.num_units=2", *options]
    settings = settings_of(tmp_path / "unused", overrides)
    left_out = Rounds(settings, [cluster(0), invalid]).state.roster.excluded
    assert left_out[1].kind == "WireError"
    assert "compression.activation=" in left_out[1].message


def lying(unit: int, change: Mapping[str, str], rounds: int) -> Any:
    """Units, of which ``unit`` changes its state in its first ``rounds`` replies."""
    lies, honest = [0], scripted_units()

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        from_unit = context.node_config["partition-id"] == unit and "UnitReply" in reply.content
        if from_unit and lies[0] < rounds:
            lies[0] += 1
            with rewritten(reply) as fields:
                for before, after in change.items():
                    assert before in fields["state"]
                    fields["state"] = fields["state"].replace(before, after)
        return reply

    return client


def test_a_run_continues_without_a_unit_that_sends_invalid_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unit's first three reports are invalid, and the fourth is valid."""
    run(tmp_path, *FAST, client=lying(1, {'"v":0.0': '"v":NaN'}, 3))
    lines = rounds_of(tmp_path)
    assert [list(line["excluded"]) for line in lines] == [["1"], ["1"], []]
    assert [line["units"] for line in lines] == [[0, 2], [0, 2], [0, 1, 2]]
    assert capsys.readouterr().out.count("excluded unit 1: WireError: not a ClusterState") == 1


@pytest.mark.parametrize("answer", ["nothing", "another unit's state"])
def test_an_invalid_reply_to_a_repeated_question_affects_no_other_unit(
    tmp_path: Path, answer: str
) -> None:
    first = lying(1, {'"v":0.0': '"v":NaN'}, 99)
    requests = [0]

    def client(message: Message, context: Context) -> Message:
        reply: Message = first(message, context)
        if context.node_config["partition-id"] == 1 and "UnitReply" in reply.content:
            requests[0] += 1
            if requests[0] > 1 and answer == "nothing":
                return Message(RecordDict(), reply_to=message)
            if requests[0] > 1:  # an invalid report in the name of unit 0
                with rewritten(reply) as decoded:
                    decoded |= {
                        "unit": 0,
                        "state": decoded["state"].replace('"unit":1', '"unit":0'),
                    }
        return reply

    run(tmp_path, *FAST, client=client)  # type: ignore[arg-type]
    lines = rounds_of(tmp_path)
    assert requests == [3]  # at the start, before rounds 1 and 2, then less often
    assert [list(line["excluded"]) for line in lines] == [["1"]] * 3
    assert [line["units"] for line in lines] == [[0, 2]] * 3


def test_real_devices_with_new_measurements_are_the_same_cluster() -> None:
    def cluster(v: float, name: str = "box", real: bool = True, rows: int = 9) -> ClusterState:
        device = DeviceProfile(name, AffineLaw(v, 0.0, 0.0, 0.0))
        return ClusterState(0, (device,), rows, real_devices=real)

    assert same_cluster(cluster(1.0), cluster(2.0))
    assert not same_cluster(cluster(1.0), cluster(1.0, name="another"))
    assert not same_cluster(cluster(1.0), cluster(1.0, rows=10))
    assert not same_cluster(cluster(1.0, real=False), cluster(2.0, real=False))


def test_a_resumed_run_plans_real_devices_with_the_times_of_its_checkpoint(tmp_path: Path) -> None:
    """A unit in a new process has measured no times yet. An absent device stays absent."""
    own = Scheduler(settings_of(tmp_path / "unused", ["federation.num_units=1"]))
    fresh = replace(cluster(0), real_devices=True, uplink=None)
    names = [each.name for each in fresh.devices]
    slow = cluster(0, speed=3.0).devices
    then = own.begin([replace(fresh, devices=slow, step=law_of(names))])
    there = replace(fresh.devices[1], max_blocks=0)
    now = own.begin([replace(fresh, devices=(fresh.devices[0], there, fresh.devices[2]))]).roster
    (resumed,) = own.resumed(then, now).roster.clusters
    (before,) = then.roster.clusters
    assert resumed.step == before.step
    assert [each.time for each in resumed.devices] == [each.time for each in before.devices]
    assert [each.max_blocks for each in resumed.devices] == [4, 0, 4]


def test_the_plan_of_real_devices_is_kept_while_a_device_is_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Plans of failed units and of simulated devices are not kept. If devices cannot hold the kept
    number of micro-batches, the new number is kept from then on and logged."""
    static = *MOBILE, "environment=static", "strategy=all"
    real = [replace(cluster(unit), real_devices=True) for unit in range(2)]
    own = Rounds(settings_of(tmp_path / "unused", static), [*real, cluster(2)])
    first = own.decide(1)
    own.end(first, {0: 1.0, 2: 1.0})
    plan = next(each for each in first.plan.clusters if each.unit == 0)
    assert own.state.kept == own.decide(2).request.kept == (plan,)
    swapped = next(plan.swapping([each.name for each in real[0].devices]))
    other = replace(plan, num_micro_batches=plan.num_micro_batches + 1)
    without = replace(real[0].devices[0], max_blocks=0)
    away = replace(real[0], devices=(without, *real[0].devices[1:]))
    for state, planned, kept in (
        (away, swapped, plan),
        (real[0], swapped, swapped),
        (away, other, other),
    ):
        request = replace(first.request, clusters=(state, *first.request.clusters[1:]))
        now = replace(first.plan, clusters=(planned,))
        own.end(replace(first, request=request, plan=now), {0: 1.0})
        assert own.state.kept == (kept,)
        assert ("the weights' last bits differ" in caplog.text) == (planned is other)
    free = Rounds(settings_of(tmp_path / "unused", [*static, "pipeline.keep_shares=false"]), real)
    free.end(free.decide(1), {0: 1.0})
    assert free.state.kept == ()


def test_a_run_logs_once_that_shared_stages_would_be_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gain must exceed the prediction's error, and the devices' times must be known."""
    options = *MOBILE, "environment=static", "strategy=dssra", "strategy.energy=adapters"
    for spread, sync_s, known, count in (
        (0.02, 1e-3, True, 1),
        (2.0, 1e-3, True, 0),
        (0.02, 1e3, True, 0),
        (0.02, 1e-3, False, 0),
    ):
        state = cluster(0)
        devices = tuple(replace(each, sharing=SharingLaw(sync_s)) for each in state.devices)
        state = replace(state, devices=devices, real_devices=True)
        own = Rounds(settings_of(tmp_path / "unused", options), [state])
        own.end(own.decide(1), {0: 1.0})
        law = law_of([each.name for each in devices], apart=True, spread=spread, send_s=0.02)
        step = replace(law, stages=stages_of({"d0": 6})) if known else None
        own.state = replace(
            own.state, roster=own.state.roster.updated({0: replace(state, step=step)})
        )
        caplog.clear()
        for number in (2, 3):
            assert not any(each.shares for each in own.decide(number).plan.clusters)
        lines = [each.getMessage() for each in caplog.records]
        assert len(lines) == count
        assert all(
            re.match(r"unit 0: with shared stages .* about .* instead of ", e) for e in lines
        )


@pytest.mark.parametrize("strategy", ["dssra", "random"])
def test_a_unit_whose_devices_cannot_hold_the_model_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    """Units that only wait for a channel are not named."""
    options = *MOBILE, f"strategy={strategy}", "environment=static"
    small = cluster(3, 1.0)
    few = tuple(replace(each, max_blocks=1) for each in small.devices[:1])
    reported = [*(cluster(unit, 1.0) for unit in range(3)), replace(small, devices=few)]
    found = play(Rounds(settings_of(tmp_path / "unused", options), reported), 8)
    assert all(one.plan.clusters for one in found)
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith("unit 3: no round can plan it: the devices hold at most 1 of ")
