"""Where a head trains is chosen for each unit and round, and nothing else comes of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federated import play, run
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from test_fewer_bits import rounds, states, summary

from client_app.app import app as units
from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.tensors import Tensors
from collapipe.wire import records
from optim.baselines import EvenSplit
from optim.planner import RoundRequest

ROUNDS = "federation.rounds=3"  # there, and back
FADING = (
    "decoder.mode=auto",
    "environment=fading",
    "channel.gain_db=[-127,-121]",
    "channel.bandwidth_hz=[1e6,1e6]",
    "optimizer=sgd",  # whose memory would be more than the activations
    "federation.local_steps=8",
    "model.num_blocks=2",
    "cluster.control_unit_block_s=3.0e-3",
    "federation.rounds=4",
)
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [
        ("optimizer.name=adamw",),
        pytest.param(("optimizer.name=sgd", "optimizer.momentum=0.9"), marks=pytest.mark.thorough),
        pytest.param(("optimizer.name=sgd",), marks=pytest.mark.thorough),
        ("optimizer.state=reset",),
    ],
    ids=lambda options: options[-1],
)


@dataclass(frozen=True)
class Alternating:
    """Even splits, and heads in one place after the other."""

    places: tuple[str, ...]

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        plan = EvenSplit().plan_round(request, rng)
        return replace(plan, clusters=tuple(map(self._with_head, plan.clusters)))

    def _with_head(self, cluster: ClusterPlan) -> ClusterPlan:
        head = self.places[cluster.unit % len(self.places)]
        sent = ("float32", "float32", head)
        return replace(cluster, uplink=UplinkPlan(cluster.unit, 0.1, 0.0, 0.0, *sent))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Turning(Alternating):
    """The next place for each unit in the next round."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        turned = np.roll(self.places, request.round).tolist()
        return Alternating(tuple(turned)).plan_round(request, rng)


def places(run_dir: Path) -> list[list[str]]:
    """Of each round's units."""
    return [
        [cluster["uplink"]["head"] for cluster in line["plan"]["clusters"]]
        for line in rounds(run_dir)
    ]


def turning(name: str = "Turning", where: str = "[server,control_unit]") -> tuple[str, ...]:
    plugin = f"strategy._target_=test_chosen_heads.{name}", f"+strategy.places={where}"
    return "decoder.mode=auto", "strategy=even", *plugin


@pytest.mark.thorough
@OPTIMIZERS
def test_weights_are_those_of_heads_that_stay(tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    """To the bit, wherever heads are, dropout and all."""
    shared = (*optimizer, "model.dropout=0.1")
    still = run(tmp_path / "still", *shared, "strategy=even", ROUNDS)
    moved = run(tmp_path / "moved", *shared, *turning(), ROUNDS)
    assert places(tmp_path / "moved")[:2] == [
        ["control_unit", "server", "control_unit"],
        ["server", "control_unit", "server"],
    ]
    assert all(torch.equal(moved[name], still[name]) for name in still)


def test_what_is_sent_is_what_was_planned_for(tmp_path: Path) -> None:
    """To the byte: the head and its optimiser's memory travel with the weights."""
    run(tmp_path, *FADING)
    uplinks = [state.uplink for state in states(tmp_path, *FADING)]
    for line in rounds(tmp_path):
        bits = 0.0
        for cluster in line["plan"]["clusters"]:
            chosen = (cluster["uplink"][name] for name in ("activation", "upload", "head"))
            payload = uplinks[cluster["unit"]].payload(*chosen)
            bits += payload.model_bits + payload.activation_bits
        assert bits == pytest.approx(8 * line["bytes_up"], rel=0.02)  # steps differ in their rows
    assert {place for heads in places(tmp_path) for place in heads} == {"server", "control_unit"}


def test_without_activations_they_are_so_exactly(tmp_path: Path) -> None:
    stays = *turning("Alternating", "[control_unit]"), ROUNDS
    run(tmp_path, *stays)
    uplinks = [state.uplink for state in states(tmp_path, *stays)]
    planned = [up.payload("float32", "float32", "control_unit").model_bits for up in uplinks]
    played = rounds(tmp_path)
    assert [8 * line["bytes_up"] for line in played] == [sum(planned)] * 3
    first, *others = [8 * line["bytes_down"] for line in played]
    assert others == [sum(planned)] * 2  # they get what they have sent
    assert first < sum(planned)  # when there was nothing to remember yet


class Damaging(ClientApp):
    """Unit 1's optimiser of the head remembers something else, in round 2."""

    def __init__(self, damage: Callable[[Tensors], None]) -> None:
        self._damage = damage

    def __call__(self, message: Message, context: Context) -> Message:
        reply = units(message, context)
        of_round = message.metadata.group_id == "2"
        if context.node_config["partition-id"] == 1 and of_round:
            state = records.unpack_record(reply.content, "head_state")
            self._damage(state)
            reply.content["head_state"] = records.pack_tensors(state)
        return reply


def _rename(state: Tensors) -> None:
    name = next(iter(state))
    state["blocks.0." + name] = state.pop(name)


def _shorten(state: Tensors) -> None:
    state[next(name for name in state if name.endswith("exp_avg"))] = torch.zeros(1)


def _drop(state: Tensors) -> None:
    del state[next(name for name in state if name.endswith("exp_avg"))]


def _negate(state: Tensors) -> None:
    name = next(name for name in state if name.endswith("exp_avg_sq"))
    state[name] = -torch.ones(state[name].shape)


def _infinite(state: Tensors) -> None:
    state[next(name for name in state if name.endswith("step"))] = torch.tensor(float("inf"))


@pytest.mark.parametrize(
    "damage",
    [
        _drop,
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (_infinite, _rename, _shorten, _negate)
        ),
    ],
)
def test_a_unit_that_sends_no_optimisers_memory_fails_alone(
    tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    stays = turning("Alternating", "[control_unit]")
    run(tmp_path, *stays, ROUNDS, client=Damaging(damage))
    assert [line["units"] for line in rounds(tmp_path)] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "WireError" in rounds(tmp_path)[1]["failures"]["1"]


def test_a_head_that_nobody_asked_to_move_has_no_memory_to_send(tmp_path: Path) -> None:
    class Giving(ClientApp):
        """Sends one though its head is on the server."""

        def __init__(self) -> None:
            pass

        def __call__(self, message: Message, context: Context) -> Message:
            reply = units(message, context)
            if message.metadata.group_id == "1" and context.node_config["partition-id"] == 0:
                state = {"head.norm.weight/exp_avg": torch.zeros(3)}
                reply.content["head_state"] = records.pack_tensors(state)
            return reply

    run(tmp_path, client=Giving())
    assert [line["units"] for line in rounds(tmp_path)] == [[1, 2], [0, 1, 2]]


@pytest.mark.parametrize("strategy", [("strategy=even",), ("strategy=dssra_paper",)])
def test_a_strategy_that_chooses_no_place_is_refused(
    tmp_path: Path, strategy: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.mode"):
        run(tmp_path, "decoder.mode=auto", *strategy)


def test_without_the_speed_of_control_units_there_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.mode=auto: .* control_unit in the inventory"):
        run(tmp_path, "decoder.mode=auto", "cluster.control_unit_block_s=null")


def test_a_clock_counts_heads_on_control_units(tmp_path: Path) -> None:
    """By the speed of these, in proportion to the head's work."""
    clocks = []
    for block_s in ("0", "1e-3", "2e-3"):
        options = "decoder.mode=control_unit", f"cluster.control_unit_block_s={block_s}"
        options = *options, "strategy=even", "pipeline.num_micro_batches=1"
        play(tmp_path / block_s, *options, "framework.train=false")
        clocks.append(summary(tmp_path / block_s)["clock_s"])
    assert clocks[1] - clocks[0] > 0
    assert clocks[2] - clocks[1] == pytest.approx(clocks[1] - clocks[0])


def test_a_memory_that_makes_weights_infinite_costs_its_unit_alone(tmp_path: Path) -> None:
    """Finite, of a size that no check of it could refuse; and seen in no loss any more."""

    def enlarge(state: Tensors) -> None:
        for name in [name for name in state if name.endswith("exp_avg")]:
            state[name] = torch.full(state[name].shape, 3e38)

    plugin = turning(where="[server,server,control_unit]")
    run(tmp_path, *plugin, ROUNDS, "federation.local_steps=1", client=Damaging(enlarge))
    assert [heads[1] for heads in places(tmp_path)][1:3] == ["control_unit", "server"]
    assert [line["units"] for line in rounds(tmp_path)][:3] == [[0, 1, 2], [0, 1, 2], [0, 2]]
