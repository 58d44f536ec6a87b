"""A control unit in an inventory has a speed, and a plan may place the head on it."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from collapipe.cli.app import app
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import InventoryCluster
from collapipe.inventory.file import read_inventory
from collapipe.inventory.planning import plan_inventory
from collapipe.state import AffineLaw, BlockCost

COST = BlockCost(9e8, 18e8, 1.5e6, 1.5e6, 1.2e8)
TEXT = """\
batch_size: 16
model: {{num_blocks: 6, forward_flops: 1.0e9, backward_flops: 2.0e9{model}}}
clusters:
  - name: shed
    devices:
      - {{name: a, chunk: {{u: 0.02, v: 0.003, w: 0.002, l: 0.002}}}}
      - {{name: b, chunk: {{u: 0.05, v: 0.003, w: 0.002, l: 0.002}}}}
{cluster}
    uplink: {{power_w: 0.5, energy_j: 100, upload_bits: {bits}, activation_bits: {sent}, \
gain_db: [-0.1], head_s: {head_s}}}
channels:
  - {{bandwidth_hz: 5.0e5, interference_w: 0.07, noise_dbm_per_hz: -174}}
round: {{drift_weight: 10}}
"""


def inventory(
    folder: Path,
    model: str = "",
    cluster: str = "",
    bits: float = 2e6,
    sent: float = 4e6,
    head_s: float = 0.0,
) -> Path:
    file = folder / "inventory.yaml"
    cluster = f"    control_unit: {cluster}" if cluster else ""
    figures = {"bits": bits, "sent": sent, "head_s": head_s}
    file.write_text(TEXT.format(model=model, cluster=cluster, **figures))
    return file


def planned(file: Path) -> tuple[float, str | None]:
    """The seconds of the planned round, and the place of its head."""
    plan = plan_inventory(read_inventory(file), "exact")
    assert plan.round is not None
    return plan.round.makespan_s, plan.clusters[0].partition.head


def test_the_head_is_placed_where_the_round_is_shorter(tmp_path: Path) -> None:
    """The round takes as long as a round whose head is fixed at the chosen place."""
    places = set[str | None]()
    for blocks, head_bits, sent in itertools.product((0.1, 2.0, 9.0), (1e5, 2e6), (1e5, 8e6)):
        head = f", head_blocks: {blocks}, head_bits: {head_bits}"
        chosen = planned(inventory(tmp_path, head, "{block_s: 0.03}", sent=sent))
        at_control_unit = {"head_s": blocks * 0.03 * 16, "bits": 2e6 + head_bits, "sent": 0}
        alone = {
            "server": planned(inventory(tmp_path, sent=sent))[0],
            "control_unit": planned(inventory(tmp_path, **at_control_unit))[0],  # type: ignore[arg-type]
        }
        assert chosen[0] == pytest.approx(min(alone.values()))
        assert alone[str(chosen[1])] == pytest.approx(chosen[0])
        places.add(chosen[1])
    assert places == {"server", "control_unit"}


def test_the_plan_command_shows_where_the_head_is(tmp_path: Path) -> None:
    head = ", head_blocks: 0.1, head_bits: 1.0e+5"
    file = inventory(tmp_path, head, "{flops_per_s: 1.0e+11}", sent=8e6)
    table = CliRunner().invoke(app, ["plan", str(file)])
    assert "control unit" in table.stdout, table.output
    answer = json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).stdout)
    assert answer["round"]["units"][0]["head"] == "control_unit"
    assert (
        CliRunner().invoke(app, ["plan", str(file), "--plot", f"{tmp_path}/a.svg"]).exit_code == 0
    )
    answer = json.loads(
        CliRunner().invoke(app, ["plan", str(inventory(tmp_path)), "--json"]).stdout
    )
    assert answer["round"]["units"][0]["head"] is None


def test_the_control_units_speed_is_converted_to_the_runs_blocks(tmp_path: Path) -> None:
    for cluster, law in (
        ("{flops_per_s: 9.0e+9}", AffineLaw(0.3, 0.0, 0.0, 0.0)),
        ("{block_s: 0.4}", AffineLaw(0.4, 0.0, 0.0, 0.0)),
        ("", None),
    ):
        clusters = InventoryCluster(str(inventory(tmp_path, cluster=cluster)), 1)
        assert clusters.control_unit(COST, 0) == law
        assert len(clusters.draw(COST, 0, np.random.default_rng(0))) == 2


@pytest.mark.parametrize("given", ["{}", "{block_s: 0.1, flops_per_s: 1.0e+9}"])
def test_a_control_unit_needs_exactly_one_speed(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=r"inventory\.yaml:8: .*control_unit.*one of block_s"):
        read_inventory(inventory(tmp_path, cluster=given))


def test_a_speed_in_flops_needs_the_flops_of_a_block(tmp_path: Path) -> None:
    file = inventory(tmp_path, cluster="{flops_per_s: 1.0e+9}")
    file.write_text(file.read_text().replace(", forward_flops: 1.0e9", ""))
    with pytest.raises(ConfigError, match=r"control_unit\.flops_per_s.*forward_flops"):
        read_inventory(file)


@pytest.mark.parametrize(
    ("model", "cluster", "lines"),
    [
        (", head_blocks: 0.1", "{block_s: 0.1}", [2, 8]),
        (", head_bits: 1.0e+5", "", [2]),
        (", head_blocks: 0.1, head_bits: 1.0e+5", "", [2, 2]),
        ("", "{block_s: 0.1}", [8]),
        (", head_blocks: 0.1, head_bits: 1.0e+5", "{block_s: 0.1}", []),
        ("", "", []),
    ],
)
def test_values_that_the_plan_does_not_use_are_noted(
    tmp_path: Path, model: str, cluster: str, lines: list[int]
) -> None:
    notes = read_inventory(inventory(tmp_path, model, cluster)).notes
    assert [int(note.split(":")[1]) for note in notes] == lines


HEAD = ", head_blocks: 0.1, head_bits: 1.0e+5"


def test_a_solver_that_cannot_place_the_head_is_refused(tmp_path: Path) -> None:
    """The solver is refused even if sending activations to the server is too expensive, as here."""
    file = inventory(tmp_path, HEAD, "{block_s: 0.03}", sent=8e9)
    assert planned(file)[1] == "control_unit"
    with pytest.raises(ConfigError, match=r"paper.*control_unit"):
        plan_inventory(read_inventory(file), "paper")


def test_the_energy_error_states_the_need_of_the_cheapest_place(tmp_path: Path) -> None:
    file = inventory(tmp_path, HEAD, "{block_s: 0.03}", sent=8e9)
    file.write_text(file.read_text().replace("energy_j: 100,", "energy_j: 1.0e-9,"))
    with pytest.raises(ConfigError, match=r"2\.1e\+06 bits") as caught:
        planned(file)
    enough = re.findall(r"take (\S+) J", str(caught.value))[0]
    file.write_text(file.read_text().replace("energy_j: 1.0e-9,", f"energy_j: {enough},"))
    assert planned(file)[1] == "control_unit"


def test_a_clusters_own_plan_does_not_depend_on_the_round(tmp_path: Path) -> None:
    latencies = []
    for sent in (1.0, 8e6):  # 1.0 favours the server, 8e6 the control unit
        file = inventory(tmp_path, HEAD, "{block_s: 0.03}", sent=sent)
        answer = json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).stdout)
        latencies.append(answer["clusters"][0]["latency_s"])
        assert answer["clusters"][0]["head"] == "server"
        assert answer["round"]["units"][0]["head"] == ("server" if sent == 1 else "control_unit")
    assert latencies[0] == pytest.approx(latencies[1])
