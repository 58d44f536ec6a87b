"""Runs that choose for each unit and round where the head trains; the weights stay the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federated import play, run
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from run_files import rounds_of, summary_of
from test_fewer_bits import states

from client_app.app import app as units
from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.tensors import Tensors
from collapipe.wire import records
from optim.baselines import EvenSplit
from optim.planner import RoundRequest

ROUNDS = "federation.rounds=3"  # a head moves and moves back
FADING = (
    "decoder.mode=auto",
    "environment=fading",
    "channel.gain_db=[-127,-121]",
    "channel.bandwidth_hz=[1e6,1e6]",
    "optimizer=sgd",  # another optimiser's state is larger than the activations
    "federation.local_steps=8",
    "model.num_blocks=2",
    "cluster.control_unit_block_s=3.0e-3",
    "federation.rounds=2",
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
    """Splits evenly; consecutive units have their heads in consecutive ``places``."""

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
    """Moves each unit's head to the next place in each round."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        turned = np.roll(self.places, request.round).tolist()
        return Alternating(tuple(turned)).plan_round(request, rng)


def places(run_dir: Path) -> list[list[str]]:
    """Return the head's place for each round and unit."""
    return [
        [cluster["uplink"]["head"] for cluster in line["plan"]["clusters"]]
        for line in rounds_of(run_dir)
    ]


def turning(name: str = "Turning", where: str = "[server,control_unit]") -> tuple[str, ...]:
    plugin = f"strategy._target_=test_chosen_heads.{name}", f"+strategy.places={where}"
    return "decoder.mode=auto", "strategy=even", *plugin


@pytest.mark.thorough
@OPTIMIZERS
def test_moving_heads_changes_no_weight(tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    """Bit for bit, with dropout."""
    shared = (*optimizer, "model.dropout=0.1")
    still = run(tmp_path / "still", *shared, "strategy=even", ROUNDS)
    moved = run(tmp_path / "moved", *shared, *turning(), ROUNDS)
    assert places(tmp_path / "moved")[:2] == [
        ["control_unit", "server", "control_unit"],
        ["server", "control_unit", "server"],
    ]
    assert all(torch.equal(moved[name], still[name]) for name in still)


def test_sent_bytes_match_the_plan(tmp_path: Path) -> None:
    """Within 2 %; the head and its optimiser state are sent with the weights."""
    run(tmp_path, *FADING)
    uplinks = [state.uplink for state in states(tmp_path, *FADING)]
    for line in rounds_of(tmp_path):
        bits = 0.0
        for cluster in line["plan"]["clusters"]:
            chosen = (cluster["uplink"][name] for name in ("activation", "upload", "head"))
            payload = uplinks[cluster["unit"]].payload(*chosen)
            bits += payload.model_bits + payload.activation_bits
        assert bits == pytest.approx(8 * line["bytes_up"], rel=0.02)  # steps differ in their rows
    assert {place for heads in places(tmp_path) for place in heads} == {"server", "control_unit"}


def test_without_activations_sent_bytes_match_the_plan_exactly(tmp_path: Path) -> None:
    stays = *turning("Alternating", "[control_unit]"), ROUNDS, "federation.local_steps=1"
    run(tmp_path, *stays)
    uplinks = [state.uplink for state in states(tmp_path, *stays)]
    planned = [up.payload("float32", "float32", "control_unit").model_bits for up in uplinks]
    played = rounds_of(tmp_path)
    assert [8 * line["bytes_up"] for line in played] == [sum(planned)] * 3
    first, *others = [8 * line["bytes_down"] for line in played]
    assert others == [sum(planned)] * 2  # units receive as many bytes as they sent
    assert first < sum(planned)  # there is no optimiser state yet


class Damaging(ClientApp):
    """Changes the head's optimiser state in unit 1's reply of round 2."""

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
def test_a_unit_with_invalid_optimizer_state_fails_alone(
    tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    stays = turning("Alternating", "[control_unit]")
    run(tmp_path, *stays, ROUNDS, client=Damaging(damage))
    assert [line["units"] for line in rounds_of(tmp_path)] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "WireError" in rounds_of(tmp_path)[1]["failures"]["1"]


def test_a_unit_that_sends_state_of_a_head_on_the_server_fails(tmp_path: Path) -> None:
    class Giving(ClientApp):
        """Sends optimiser state although the unit's head is on the server."""

        def __init__(self) -> None:
            pass

        def __call__(self, message: Message, context: Context) -> Message:
            reply = units(message, context)
            if message.metadata.group_id == "1" and context.node_config["partition-id"] == 0:
                state = {"head.norm.weight/exp_avg": torch.zeros(3)}
                reply.content["head_state"] = records.pack_tensors(state)
            return reply

    run(tmp_path, client=Giving())
    assert [line["units"] for line in rounds_of(tmp_path)] == [[1, 2], [0, 1, 2]]


@pytest.mark.parametrize("strategy", [("strategy=even",), ("strategy=dssra_paper",)])
def test_a_strategy_that_does_not_choose_places_is_refused(
    tmp_path: Path, strategy: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.mode"):
        run(tmp_path, "decoder.mode=auto", *strategy)


def test_choosing_places_requires_the_speed_of_control_units(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.mode=auto: .* control_unit in the inventory"):
        run(tmp_path, "decoder.mode=auto", "cluster.control_unit_block_s=null")


def test_the_clock_counts_heads_on_control_units(tmp_path: Path) -> None:
    """The head's time is proportional to the control unit's seconds per block."""
    clocks = []
    for block_s in ("0", "1e-3", "2e-3"):
        options = "decoder.mode=control_unit", f"cluster.control_unit_block_s={block_s}"
        options = *options, "strategy=even", "pipeline.num_micro_batches=1"
        play(tmp_path / block_s, *options, "framework.train=false")
        clocks.append(summary_of(tmp_path / block_s)["clock_s"])
    assert clocks[1] - clocks[0] > 0
    assert clocks[2] - clocks[1] == pytest.approx(clocks[1] - clocks[0])


def test_state_that_makes_weights_infinite_fails_only_its_unit(tmp_path: Path) -> None:
    """The state is finite, so that the server accepts it. With one step per round, the loss is
    computed before the weights become infinite."""

    def enlarge(state: Tensors) -> None:
        for name in [name for name in state if name.endswith("exp_avg")]:
            state[name] = torch.full(state[name].shape, 3e38)

    plugin = turning(where="[server,server,control_unit]")
    run(tmp_path, *plugin, ROUNDS, "federation.local_steps=1", client=Damaging(enlarge))
    assert [heads[1] for heads in places(tmp_path)][1:3] == ["control_unit", "server"]
    assert [line["units"] for line in rounds_of(tmp_path)][:3] == [[0, 1, 2], [0, 1, 2], [0, 2]]
