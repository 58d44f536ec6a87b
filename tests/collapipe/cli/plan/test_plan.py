"""``collapipe plan``: errors, JSON, the table, the chart, and the documented examples."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface import folder

from collapipe.formatting import amount, seconds, three_digits
from collapipe.inventory import planning
from collapipe.models.cost import head_flops, measure_cost
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.text.vocabulary import Vocabulary
from optim.problem import ClusterProblem, ClusterSolution
from optim.solvers import CLUSTER_SOLVERS, cluster_solver

ROOT = Path(__file__).parents[4]
Command = Callable[..., tuple[int, str, str]]

INVENTORY = """\
batch_size: 64
max_micro_batches: 64
latency: overlap
model:
  num_blocks: 12
  forward_flops: 9.1e8
  backward_flops: 1.8e9
  activation_bits: 1.57e6
  gradient_bits: 1.57e6
  block_bytes: 1.2e8
clusters:
  - name: workshop
    devices:
      - name: pi-1
        chunk: {u: 0.02, v: 0.001, w: 0.003, l: 0.05}
        max_blocks: 6
      - name: jetson
        flops_per_s: 4.0e11
        memory_bytes: 8.0e9
        energy_j: 500
        power_w: 15
        d2d_rate_bps: 1.0e8
channels: []
"""
UPLINK = "    uplink: {power_w: 0.5, energy_j: 10, upload_bits: 4.7e6, gain_db: [-0.1]}\n"
CHANNEL = "channels:\n  - {bandwidth_hz: 5.0e5, interference_w: 0.07, noise_dbm_per_hz: -174}\n"
JOINT = INVENTORY.replace("channels: []\n", UPLINK + CHANNEL)


@pytest.fixture
def command(command: Command) -> Command:
    """Run ``collapipe plan ARGUMENTS``: status, standard output, standard error."""
    return functools.partial(command, "plan")


@pytest.fixture
def answer(command: Command, tmp_path: Path) -> Callable[..., Any]:
    """A function that returns the JSON output for an inventory."""

    def ask(text: str, *arguments: str) -> Any:
        status, out, err = command(written(tmp_path, text), "--json", *arguments)
        assert (status, err) == (0, "")
        return json.loads(out)

    return ask


# Errors

NOT_YAML = "a: [1,\nb: }\n"
NO_DEVICES = INVENTORY[: INVENTORY.index("      - name: pi-1")].replace("devices:", "devices: []")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NOT_YAML, ":2: "),
        (INVENTORY.replace("flops_per_s", "flop_per_s"), ":18: clusters[0].devices[1]."
         "flop_per_s=4.0e11: unknown key; nearest: flops_per_s"),
        (INVENTORY.replace("  forward_flops: 9.1e8\n", ""), "devices[1].flops_per_s=4.0e11: needs "
         "figures that model (line 4) lacks: forward_flops;"),
        (INVENTORY.replace("_bits: 1.57e6", "_bits: "), ":8: model.activation_bits: is empty"),
        (re.sub("  .*_bits: .*\n", "", INVENTORY), "lacks: activation_bits, gradient_bits;"),
        (INVENTORY.replace("  block_bytes: 1.2e8\n", ""), "memory_bytes=8.0e9: needs"),
        (INVENTORY.replace("  num_blocks: 12\n", ""), ":4: model.num_blocks: "),
        (INVENTORY.replace("u: 0.02", "u: -0.02"), ":15: clusters[0].devices[0].chunk.u=-0.02: "
         "must be above 0"),
        (INVENTORY.replace("v: 0.001", "v: -1"), "chunk.v=-1: must be at least 0"),
        (INVENTORY.replace("4.0e11", "0"), ":18: clusters[0].devices[1].flops_per_s=0: "),
        (INVENTORY.replace("4.0e11", ".nan"), "flops_per_s=.nan: must be finite"),
        (INVENTORY.replace("4.0e11", "inf"), "flops_per_s=inf: must be finite"),
        (INVENTORY.replace("4.0e11", "1e400"), "flops_per_s=1e400: "),
        (INVENTORY.replace("4.0e11", "fast"), "flops_per_s=fast: must be a number; such as"),
        (INVENTORY.replace("4.0e11", "'4.0e11'"), "flops_per_s='4.0e11': must be a number; remove"),
        (INVENTORY.replace("4.0e11", "true"), "flops_per_s=true: must be a number"),
        (INVENTORY.replace("4.0e11", "[4.0e11]"), "flops_per_s: must be a number, not a list"),
        (INVENTORY.replace("max_blocks: 6", "max_blocks: 6.5"), "max_blocks=6.5: must be a whole "),
        (INVENTORY.replace("max_blocks: 6", "max_blocks: 6\n        address: 10.0.0.5"),
         ".devices[0].address=10.0.0.5: must be HOST:PORT, such as"),
        (INVENTORY.replace("jetson", "pi-1"), ":17: clusters[0].devices[1].name=pi-1: devices[0] "),
        (NO_DEVICES, "clusters[0].devices: "),
        (INVENTORY.replace("8.0e9", "2.0e8"), ":12: clusters[0]: the devices hold at most 7 of 12 "
         "blocks in 1 micro-batch (pi-1: 6 by max_blocks, jetson: 1 by memory_bytes 2e+08 (at "
         "least 120 MB a block)); raise pi-1's max_blocks or jetson's memory_bytes by 5 "
         "blocks in all, or add 1 more like pi-1, or lower model.num_blocks to 7\n"),
        (INVENTORY.replace("max_blocks: 6", "max_blocks: 3\n        memory_bytes: 3.6e8").replace(
            "8.0e9", "2.0e8"), "raise pi-1's max_blocks and memory_bytes "
         "or jetson's memory_bytes by 8 blocks in all, or add 3 more like "
         "pi-1"),
        (INVENTORY.replace("energy_j: 500", "energy_j: 1"), "6 of 12 blocks in 1 micro-batch "
         "(pi-1: 6 by max_blocks, jetson: 0 by energy_j 1 where 1 block takes 36.7 J); raise "
         "jetson's energy_j to 69.2, or add 1 more like pi-1, or lower model.num_blocks to 6\n"),
        (INVENTORY.replace("batch_size: 64", "batch_size: 0"), ":1: batch_size=0: "),
        (INVENTORY.replace("num_blocks: 12", "name: transfomer"), ":5: model.name=transfomer: no "
         "model of conf/model/; nearest: transformer"),
        (INVENTORY.replace("overlap", "overlaps"), ":3: latency=overlaps: must be one of overlap"),
        (INVENTORY + "batch_size: 8\n", ":24: the file has batch_size twice"),
        (INVENTORY.replace("        d2d_rate_bps: 1.0e8\n", ""), "devices[1].d2d_rate_bps: "),
        (INVENTORY.replace("max_blocks: 6", "flops_per_s: 1"), "devices[0].flops_per_s=1: "),
        (INVENTORY.replace("        chunk: {u: 0.02, v: 0.001, w: 0.003, l: 0.05}\n", ""),
         "devices[0].flops_per_s: is missing"),
        (INVENTORY.replace("clusters:", "cluster:"), ":11: cluster: unknown key; nearest: clu"),
        (INVENTORY.replace("name: pi-1", 'name: "a\\nb"'), ":14: clusters[0].devices[0].name="),
        (INVENTORY.replace("l: 0.05", "l: 0.05, block_flops: 1.0e9"), ".yaml --write, or give "),
        (INVENTORY.replace("jetson", "x" * 65), ": must be a text of at most 64 characters"),
        (JOINT.replace("workshop", "x" * 65), ": must be a text of at most 64 characters"),
        (INVENTORY + '"a\\nb": 1\n', ":24: a b=1: unknown key"),
        ("batch_size: 9999\nmodel: {num_blocks: 1}\nclusters: [{name: a, devices: [{name: b, "
         "chunk: {u: 1}}]}]\n", ":1: max_micro_batches: batch_size=9999 "),
        (JOINT.replace("energy_j: 10,", "energy_j: 0.01,"), ":23: clusters[0].uplink."
         "energy_j=0.01: no cluster can afford its upload; nearest to it is workshop on channel 0: "
         "4.7e+06 bits at power_w=0.5 take 1.57 J"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_bad_input_is_one_line_and_status_2(
    command: Command, tmp_path: Path, text: str, message: str, options: list[str]
) -> None:
    assert text not in (INVENTORY, JOINT)
    file = written(tmp_path, text)
    status, out, err = command(file, *options)
    assert status == 2, err
    assert err.startswith(f"error: {file}:")
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert "Traceback" not in err


def test_the_error_for_too_little_energy_names_a_sufficient_amount(
    command: Command, tmp_path: Path
) -> None:
    least = 4.7e6 * 0.693147 * 0.07 / (10**-0.01 * 5.0e5)  # ln 2·θ·(I + B·N_0)/(h·B)
    too_small = JOINT.replace("energy_j: 10,", f"energy_j: {0.99 * least:.4f},")
    status, _, err = command(written(tmp_path, too_small))
    assert status == 2
    (enough,) = re.findall(r"[\d.]+(?= J;)", err)
    printed = json.loads(
        command(
            written(tmp_path, JOINT.replace("energy_j: 10,", f"energy_j: {enough},")), "--json"
        )[1]
    )
    assert printed["round"]["units"][0]["power_w"] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--solver", "exakt"], "nearest: exact"),
        (["--solver", "pipedreem"], "nearest: pipedream"),
        (
            ["--solver", "vanilla_fl"],
            ":12: clusters[0]: vanilla_fl: every device trains",
        ),
        (["--plot", "chart.pdf"], "--plot chart.pdf: must end in .svg or .png"),
        (["--plot", "no/such/folder/chart.svg"], "there is no folder no/such/folder"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    status, out, err = command(written(tmp_path, INVENTORY), *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_missing_file_is_a_one_line_error(command: Command, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.yaml", tmp_path):
        status, out, err = command(path, "--json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"{path}: cannot be read" in err


# Answers


def test_json_has_the_names_that_scripts_rely_on(answer: Callable[..., Any]) -> None:
    printed = answer(INVENTORY)
    assert printed.keys() == {"version", "clusters"}
    (cluster,) = printed["clusters"]
    assert cluster.keys() == {
        "name", "head", "num_segments", "num_micro_batches", "latency_s", "segments",
        "lower_bound_s", "gap", "solver", "solve_time_s", "front", "witness_s",
    }  # fmt: skip
    assert cluster["name"] == "workshop"
    assert [segment["device"] for segment in cluster["segments"]] == ["pi-1", "jetson"]
    first, second = cluster["segments"]
    assert (first["first_block"], second["first_block"]) == (0, first["blocks"])
    assert first["blocks"] + second["blocks"] == 12
    assert cluster["gap"] == 0.0
    assert len(cluster["witness_s"]) == 64  # thresholds for each number of micro-batches
    assert cluster["lower_bound_s"] == cluster["latency_s"] == cluster["front"][-1]["latency_s"]
    points = cluster["front"]
    assert all(p.keys() == {"num_segments", "num_micro_batches", "latency_s"} for p in points)
    assert [point["num_segments"] for point in points] == [1, 2]


def test_the_json_of_a_joint_round_has_fixed_names_and_adds_up(answer: Callable[..., Any]) -> None:
    printed = answer(JOINT + "round: {drift_weight: 0.5, queues: [3]}\n")
    assert printed.keys() == {"version", "clusters", "round"}
    joint = printed["round"]
    assert joint.keys() == {
        "units", "idle", "makespan_s", "objective", "lower_bound", "gap", "solver",
        "solve_time_s", "gammas", "queues",
    }  # fmt: skip
    (unit,) = joint["units"]
    assert unit.keys() == {
        "cluster", "head", "channel", "power_w", "pipeline_s", "upload_s", "total_s", "segments",
        "num_segments", "num_micro_batches",
    }  # fmt: skip
    assert (unit["cluster"], unit["channel"], joint["idle"]) == ("workshop", 0, [])
    assert 0 < unit["power_w"] <= 0.5
    assert joint["makespan_s"] == unit["total_s"] == unit["pipeline_s"] + unit["upload_s"]
    drift = 3 * joint["gammas"]["workshop"]
    assert joint["objective"] == pytest.approx(0.5 * joint["makespan_s"] + drift, rel=1e-9)
    assert joint["gap"] <= 1e-9
    queue = max(0.0, 3 + joint["gammas"]["workshop"] - 0.84)
    assert joint["queues"]["workshop"] == pytest.approx(queue, rel=1e-9)


def test_a_round_may_choose_another_split_than_the_fastest(command: Command) -> None:
    file = ROOT / "docs/examples/joint-round.yaml"
    printed = json.loads(command(file, "--json")[1])
    fastest = {cluster["name"]: cluster for cluster in printed["clusters"]}
    chosen = {unit["cluster"]: unit for unit in printed["round"]["units"]}
    garage = chosen["garage"]
    assert garage["num_segments"] == len(garage["segments"]) < fastest["garage"]["num_segments"]
    assert garage["pipeline_s"] > fastest["garage"]["latency_s"]
    assert len(fastest["garage"]["segments"]) == fastest["garage"]["num_segments"]
    assert garage["total_s"] < printed["round"]["makespan_s"]
    assert "chosen by the round; the fastest, S = 3, takes" in command(file)[1]


def test_an_idle_cluster_is_shown_with_the_energy_of_its_cheapest_channel(
    command: Command, tmp_path: Path
) -> None:
    cluster = JOINT[JOINT.index("  - name: workshop") : JOINT.index("channels:")]
    poor = cluster.replace("workshop", "shed").replace("energy_j: 10,", "energy_j: 0.001,")
    text = JOINT.replace(cluster, cluster + poor).replace("[-0.1]", "[-0.1, -6]")
    text += CHANNEL.removeprefix("channels:\n")
    enough = 4.7e6 * 0.693147 * 0.07 / (10**-0.01 * 5.0e5)
    out = command(written(tmp_path, text))[1]
    assert f"shed: at any power its upload costs more than {enough:.3g} J" in out
    assert "1.57 J pay for full power" in " ".join(out.split())


def test_clusters_without_a_channel_are_idle_and_the_reason_is_shown(
    command: Command, tmp_path: Path
) -> None:
    cluster = JOINT[JOINT.index("  - name: workshop") : JOINT.index("channels:")]
    second = cluster.replace("workshop", "garage")
    third = cluster.replace("workshop", "shed").replace("energy_j: 10,", "energy_j: 0.001,")
    text = JOINT.replace(cluster, cluster + second + third) + "round: {queues: [0, 9, 0]}\n"
    joint = json.loads(command(written(tmp_path, text), "--json")[1])["round"]
    assert [unit["cluster"] for unit in joint["units"]] == ["garage"]
    assert joint["idle"] == ["workshop", "shed"]
    _, out, _ = command(written(tmp_path, text))
    assert "workshop: the channels serve others better in this round" in out
    assert "shed: at any power its upload costs more than" in out


def test_a_proof_names_the_kind_of_plans_that_it_covers(command: Command, tmp_path: Path) -> None:
    """The proof does not cover replicas, which may be faster."""
    out = " ".join(command(written(tmp_path, JOINT))[1].split())
    assert "no pipeline of single devices is faster under this law (gap 0)" in out
    assert "no round of such pipelines is better under this law (gap 0)" in out


@pytest.mark.parametrize("name", sorted({*CLUSTER_SOLVERS} - {"exact", "shared"}))
def test_only_the_exact_solver_proves_a_round(command: Command, tmp_path: Path, name: str) -> None:
    roomy = JOINT.replace("max_blocks: 6", "max_blocks: 12") + "round: {queues: [3]}\n"
    joint = json.loads(command(written(tmp_path, roomy), "--json", "--solver", name)[1])["round"]
    assert (joint["solver"], joint["lower_bound"], joint["gap"]) == (name, 0.0, 1.0)
    out = " ".join(command(written(tmp_path, roomy), "--solver", name)[1].split())
    assert "gap 0" not in out[out.index("round: ") :]
    assert (f"the best round with these splits, by {name}" in out) == (name != "paper")


def test_help_lists_the_solvers_and_the_page(command: Command) -> None:
    out = command("--help")[1]
    assert all(name in out for name in CLUSTER_SOLVERS)
    assert "docs/reference/inventory.md" in out
    assert "INVENTORY is a YAML file that describes your devices" in " ".join(out.split())


@pytest.mark.parametrize("name", sorted(CLUSTER_SOLVERS))
def test_every_solver_returns_a_plan_of_all_blocks(
    command: Command, tmp_path: Path, name: str
) -> None:
    roomy = INVENTORY.replace("max_blocks: 6", "max_blocks: 12")
    exact = json.loads(command(written(tmp_path, roomy), "--json")[1])["clusters"][0]
    status, out, err = command(written(tmp_path, roomy), "--json", "--solver", name)
    assert (status, err) == (0, "")
    (cluster,) = json.loads(out)["clusters"]
    assert cluster["solver"] == name
    assert name == "vanilla_fl" or cluster["latency_s"] >= exact["latency_s"] * (1 - 1e-9)
    held = [segment["blocks"] for segment in cluster["segments"]]
    assert held == [12, 12] if name == "vanilla_fl" else sum(held) == 12


def test_a_plan_that_breaks_a_constraint_is_not_printed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_fast(problem: ClusterProblem, rng: object) -> ClusterSolution:
        right = cluster_solver("exact")(problem, rng)  # type: ignore[arg-type]
        best = replace(right.best, latency_s=right.best.latency_s / 2)
        certificate = replace(right.certificate, objective=best.latency_s, lower_bound=0.0)
        return ClusterSolution((best,), best, certificate)

    monkeypatch.setattr(planning, "cluster_solver", lambda name: too_fast)
    status, out, err = command(written(tmp_path, INVENTORY), "--json")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "latency" in err


def test_an_energy_budget_without_power_is_noted_on_standard_error(
    command: Command, tmp_path: Path
) -> None:
    text = INVENTORY.replace("        power_w: 15\n", "")
    status, out, err = command(written(tmp_path, text), "--json")
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("note: ")
    assert "energy_j=500: not planned with" in err
    assert json.loads(out)["clusters"][0]["num_segments"] == 2


# The table


@pytest.mark.parametrize(
    ("latency", "limit"),
    [
        ("overlap", "max_blocks: 6"),
        ("flow_shop", "max_blocks: 6"),
        ("bound", "max_blocks: 6"),
        ("overlap", "max_blocks: 6\n        power_w: 1\n        energy_j: 8.3"),
    ],
)
def test_the_table_shows_memory_idle_times_and_the_cost_of_an_even_split(
    command: Command, tmp_path: Path, latency: str, limit: str
) -> None:
    text = INVENTORY.replace("overlap", latency).replace("8.0e9", "1.0e9")
    text = text.replace("max_blocks: 6", limit)
    cluster = json.loads(command(written(tmp_path, text), "--json")[1])["clusters"][0]
    even = json.loads(command(written(tmp_path, text), "--json", "--solver", "gpipe")[1])
    status, out, err = command(written(tmp_path, text))
    assert (status, err) == (0, "")
    factor = even["clusters"][0]["latency_s"] / cluster["latency_s"]
    assert f"{factor:.2f} times as long" in out
    held = {segment["device"]: segment["blocks"] for segment in cluster["segments"]}
    assert f"{held['pi-1']} of 6 blocks" in out
    assert f"{held['jetson'] * 0.12:.3g} of 1 GB" in out
    rows = re.findall(r"^(?:pi-1|jetson) .*?(\d+)% +(\d+)% +(\d+)% +(\d+)%$", out, re.MULTILINE)
    assert [sum(map(int, row)) for row in rows] == pytest.approx([100, 100], abs=2)


CAUSAL = """\
batch_size: 8
max_micro_batches: 4
model: {name: llama, tokens: 12}
adapter: {name: lora}
pipeline: {recompute: false}
clusters:
  - name: desk
    control_unit: {flops_per_s: 1.0e6}
    devices:
"""


def test_the_table_shows_whether_a_language_model_fits(command: Command, tmp_path: Path) -> None:
    folder(tmp_path, "llama", vocab_size=500)
    spec, vocabulary = LoraSpec(HuggingFaceSpec(str(tmp_path / "llama"))), Vocabulary(500, 0, 0, 0)
    cost, head = measure_cost(spec, 12, 8), head_flops(spec, vocabulary, 12)

    def ask(memory: float, text: str = CAUSAL) -> tuple[int, str, str]:
        figures = f"flops_per_s: 1.0e6, d2d_rate_bps: 1.0e12, memory_bytes: {memory:.1f}"
        rows = (f"      - {{name: box-{k}, {figures}}}\n" for k in range(3))
        status, out, err = command(written(tmp_path, text + "".join(rows)))
        return status, " ".join(out.split()), err

    status, out, _ = ask(2.5 * cost.block_bytes)
    assert status == 0
    (latency_s,) = re.findall(r"a batch ([\d.]+) s;", out)
    (tokens_per_s,) = re.findall(r"fits on 1 device or more; box-0 .*; ([\d.]+) tokens/s", out)
    assert float(tokens_per_s) == pytest.approx(8 * 12 / float(latency_s), rel=0.01)
    assert len(re.findall(r"box-\d [\d.]+ of [\d.]+ kB(?=[,;])", out)) == 2
    own = [500 * 16 * 4, 500 * 16 * 4 + 16 * 4]  # the head also has a norm
    embedding, of_head = (amount(each, "B") for each in own)
    assert f"embedding {embedding} on the control unit; head {of_head} there or" in out
    assert f"{three_digits(head / cost.flops)} blocks' work counted" in out
    assert float(latency_s) > 8 * head / 1e6
    status, out, _ = ask(2.5 * cost.block_bytes, re.sub("    control_unit.*\n", "", CAUSAL))
    assert "not counted without control_unit" in out
    assert float(re.findall(r"a batch ([\d.]+) s;", out)[0]) < 8 * head / 1e6
    status, _, err = ask(1.1 * cost.block_bytes)
    assert status == 2
    assert "at most 3 of 4 blocks" in err and "or add 1 more like box-0" in err
    assert "fewer tokens" in err
    assert ask(1.1 * cost.block_bytes, CAUSAL.replace("adapter: {name: lora}\n", ""))[0] == 2
    status, out, _ = ask(1.1 * cost.block_bytes, CAUSAL.replace("false", "auto"))
    assert status == 0
    assert re.search(r"recompute box-\d.*: forward is computed twice", out)
    printed = command(tmp_path / "inventory.yaml", "--json")[1]
    assert '"recomputing": true' in printed
    fixed = CAUSAL.replace("false", "auto").replace(
        "tokens: 12", f"tokens: 12, block_bytes: {cost.block_bytes}"
    )
    assert (
        ask(1.1 * cost.block_bytes, fixed)[0] == 2
    )  # given figures are used with and without recomputation


def test_an_even_split_beyond_the_limits_is_marked(command: Command, tmp_path: Path) -> None:
    text = INVENTORY.replace("max_blocks: 6", "max_blocks: 5")
    out = " ".join(command(written(tmp_path, text))[1].split())
    assert "times as long; beyond the limits of pi-1 " in out


@pytest.mark.parametrize("text", [INVENTORY, JOINT], ids=["cluster", "round"])
def test_the_table_fits_80_columns_and_needs_no_colour(
    command: Command, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "raspberry-pi-5-in-the-kitchen"
    long = text.replace("jetson", name)
    status, out, _ = command(written(tmp_path, long))
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert re.search(rf"^{name} +\d+-\d+ .* \d+%$", out, re.MULTILINE)
    assert "drain" not in out
    monkeypatch.setenv("COLUMNS", "100")
    assert re.search(rf"^{name} .*(\d+% +){{3}}\d+%$", command(written(tmp_path, long))[1], re.M)


def test_names_are_not_cut_on_a_narrow_terminal(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = command(written(tmp_path, JOINT.replace("workshop", "a-workshop-in-the-yard")))[1]
    assert re.search(r"^a-workshop-in-the-yard +0 +0\.5 W .*0 -> ", out, re.MULTILINE)
    assert re.search(r"^jetson +\d+-\d+ .* \d+%$", out, re.MULTILINE)


def test_a_device_excluded_by_its_energy_is_reported(command: Command, tmp_path: Path) -> None:
    text = INVENTORY.replace("energy_j: 500", "energy_j: 0.001").replace("blocks: 6", "blocks: 12")
    assert "jetson 0.001 J: a block needs 36.7 J" in command(written(tmp_path, text))[1]
    poor = text.replace("energy_j: 0.001", "energy_j: 36.7")
    assert "a block needs" not in command(written(tmp_path, poor))[1]


def test_an_even_split_is_not_compared_with_itself(command: Command, tmp_path: Path) -> None:
    assert "even split" in command(written(tmp_path, INVENTORY), "--solver", "pipeline")[1]
    assert "even split" not in command(written(tmp_path, INVENTORY), "--solver", "gpipe")[1]


def test_the_table_of_a_single_device_shows_which_hop_is_counted(
    command: Command, tmp_path: Path
) -> None:
    lone = re.sub("      - name: pi-1\n.*\n.*\n", "", INVENTORY)
    out = command(written(tmp_path, lone))[1]
    assert "hop         to the next device; the last one's, back to the control unit" in out
    assert "even split" not in out
    out = command(written(tmp_path, lone.replace("        d2d_rate_bps: 1.0e8\n", "")))[1]
    assert "hop         to the control unit; not counted" in out
    out = command(written(tmp_path, lone.replace("batch_size: 64", "batch_size: 1")))[1]
    assert "m = 1 micro-batch of 1 sample\n" in out


def test_markup_in_a_name_is_shown_literally(command: Command, tmp_path: Path) -> None:
    text = INVENTORY.replace("name: jetson", 'name: "[red]a[/red]"')
    assert "[red]a[/red]" in command(written(tmp_path, text))[1]


def test_replicas_are_described_differently_from_segments(command: Command, tmp_path: Path) -> None:
    roomy = INVENTORY.replace("max_blocks: 6", "max_blocks: 12")
    _, out, _ = command(written(tmp_path, roomy), "--solver", "vanilla_fl")
    assert "every device trains the whole encoder on 32 samples" in out
    assert "vanilla_fl counts neither sending activations nor adding gradients" in out


# The chart


@pytest.mark.parametrize("suffix", ["svg", "png", "PNG"])
def test_the_chart_is_drawn_the_same_every_time(
    command: Command, tmp_path: Path, suffix: str
) -> None:
    charts = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for chart in charts:
        assert command(written(tmp_path, JOINT), "--plot", chart)[0] == 0
    first, second = (chart.read_bytes() for chart in charts)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix.lower() == "png" else b"<?xml")


def test_a_long_name_of_a_cluster_does_not_push_figures_out_of_the_chart(
    command: Command, tmp_path: Path
) -> None:
    chart, long = tmp_path / "chart.svg", JOINT.replace("name: workshop", f"name: {'w' * 64}")
    assert command(written(tmp_path, long), "--plot", chart)[0] == 0
    drawn = re.findall("<!-- (.*?) -->", chart.read_text())
    assert any("a batch" in line for line in drawn) and 96 <= max(map(len, drawn)) <= 100


def test_a_counted_head_has_a_row_in_the_table_and_the_chart(
    command: Command, tmp_path: Path
) -> None:
    """Only the inventory of the language model has figures of its head."""
    chart, file = tmp_path / "chart.svg", ROOT / "docs" / "examples" / "language-model.yaml"
    for text, counts in ((file.read_text(), True), (INVENTORY, False)):
        text = text.replace("name: qwen2.5-1.5b", f"name: {file.parent / 'qwen2.5-1.5b'}")
        status, out, _ = command(written(tmp_path, text), "--plot", chart)
        assert status == 0 and ("\nhead " in out) == counts
        assert ("<!-- head -->" in chart.read_text()) == counts


def test_a_head_with_missing_figures_is_reported_as_not_counted(
    command: Command, tmp_path: Path
) -> None:
    speed = INVENTORY.replace("    devices:\n", "    control_unit: {block_s: 1}\n    devices:\n")
    assert re.search(
        r"\nhead +not counted; model\.head_blocks gives its work in blocks\n",
        command(written(tmp_path, speed))[1],
    )


def test_a_name_cannot_break_the_chart(command: Command, tmp_path: Path) -> None:
    text = INVENTORY.replace("jetson", "$a^{$").replace("workshop", "$\\frac$")
    status, _, err = command(written(tmp_path, text), "--plot", tmp_path / "chart.png")
    assert (status, err) == (0, "")


def test_letters_without_a_glyph_are_noted_in_one_line(command: Command, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    status, _, err = command(
        written(tmp_path, INVENTORY.replace("jetson", "\u65e5")), "--plot", chart
    )
    assert (status, err.count("\n")) == (0, 1) and err.startswith(f"note: {chart}: Glyph 26085 ")


def test_replacing_a_chart_is_said(command: Command, tmp_path: Path) -> None:
    (chart := tmp_path / "chart.svg").write_text("another picture")
    status, _, err = command(written(tmp_path, INVENTORY), "--plot", chart)
    assert (status, err) == (0, f"note: {chart} was replaced\n")
    assert "<svg" in chart.read_text()


def test_an_unwritable_chart_is_a_one_line_error(command: Command, tmp_path: Path) -> None:
    (tmp_path / "chart.svg").mkdir()
    status, out, err = command(
        written(tmp_path, INVENTORY), "--json", "--plot", tmp_path / "chart.svg"
    )
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "is a folder; name a file" in err


# Imported libraries and documented output


def test_planning_imports_no_heavy_libraries(tmp_path: Path) -> None:
    """The command plans a cluster and a round."""
    script = (
        "import sys\nfrom collapipe.cli.app import main\n"
        "for file in sys.argv[1:]:\n"
        "    sys.argv = ['collapipe', 'plan', file]\n"
        "    try:\n        main()\n    except SystemExit as ended:\n        assert not ended.code\n"
        "print(*sorted({'torch', 'flwr', 'hydra', 'matplotlib', 'cvxpy', 'datasets'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    files = [tmp_path / "cluster.yaml", tmp_path / "round.yaml"]
    for file, text in zip(files, (INVENTORY, JOINT), strict=True):
        file.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", script, *files],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert ended.stdout.count("workshop") >= len(files)
    assert ended.stderr.strip() == ""


def test_the_page_shows_what_the_command_prints(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs/tutorials/plan-boxes.md").read_text()
    shown = re.findall(r"```\n\$ collapipe plan (\S+)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 4
    assert "6.84 s" in (out := command("docs/examples/adapters.yaml")[1])
    assert "sharing     5.45 s (-20%)" in out
    for file, table in shown:
        status, out, err = command(file)
        assert (status, err) == (0, "")
        assert without_times(table).strip() in without_times(out)


def without_times(table: str) -> str:
    """The table without the solvers' times, with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"found\s+by\s+\w+\s+in\s+\S+\s+\w+", "", table))


def written(folder: Path, text: str) -> Path:
    path = folder / "inventory.yaml"
    path.write_text(text)
    return path


ADAPTERS = """
batch_size: 12
latency: flow_shop
model: {num_blocks: 4, forward_flops: 1.0e9, backward_flops: 2.0e9, activation_bits: 1.0e6,
        gradient_bits: 1.0e6, trained_bytes: 1.0e4}
clusters:
  - name: workshop
    devices:
      - {name: fast, flops_per_s: 4.0e9, d2d_rate_bps: 1.0e8}
      - {name: slow, flops_per_s: 2.0e9, d2d_rate_bps: 1.0e8}
"""


TIGHT = """
batch_size: 64
model: {name: dates_transformer, tokens: 32, num_blocks: 2}
max_micro_batches: 1
clusters:
  - name: home
    devices:
      - {name: a, flops_per_s: 1.0e9, d2d_rate_bps: 1.0e9, memory_bytes: 7.8e6}
      - {name: b, flops_per_s: 1.0e9, d2d_rate_bps: 1.0e9, memory_bytes: 7.8e6}
      - {name: c, flops_per_s: 1.0e9, d2d_rate_bps: 1.0e9, memory_bytes: 7.8e6}
"""


def test_devices_without_memory_for_all_rows_of_a_block_can_share_it(
    command: Command, tmp_path: Path
) -> None:
    """The error without sharing names the solver that shares stages."""
    status, _, err = command(written(tmp_path, TIGHT))
    assert status and "in 1 micro-batch (" in err and err.endswith(": --solver shared\n")
    out = command(written(tmp_path, TIGHT), "--solver", "shared")[1]
    assert "0-1, 22 rows of 64" in out and "fits        on 3 devices or more; a " in out


def test_the_error_of_too_little_memory_counts_the_smallest_micro_batch(
    command: Command, tmp_path: Path
) -> None:
    tiny = TIGHT.replace("7.8e6", "1.0e6").replace("batches: 1", "batches: 64")
    status, _, err = command(written(tmp_path, tiny))
    assert status and "in 64 micro-batches (a: 0 by memory_bytes 1e+06 (at least 1." in err
    assert "--solver shared" not in err


ROOMS = """
batch_size: 16
latency: overlap
model: {num_blocks: 8, forward_flops: 1.0e9, backward_flops: 2.0e9, activation_bits: 1.0e6,
        gradient_bits: 1.0e6, block_bytes: 1.0e6}
clusters:
  - name: home
    devices:
      - {name: desk-1, flops_per_s: 1.0e11, d2d_rate_bps: 9.4e8, memory_bytes: 2.0e6}
      - {name: attic-1, flops_per_s: 1.0e11, d2d_rate_bps: 9.4e8, memory_bytes: 2.0e6}
      - {name: desk-2, flops_per_s: 1.0e11, d2d_rate_bps: 9.4e8, memory_bytes: 2.0e6}
      - {name: attic-2, flops_per_s: 1.0e11, d2d_rate_bps: 9.4e8, memory_bytes: 2.0e6}
    links:
      - {between: [desk-1, attic-1], d2d_rate_bps: 2.0e7, hop_latency_s: 0.01}
      - {between: [desk-1, attic-2], d2d_rate_bps: 2.0e7, hop_latency_s: 0.01}
      - {between: [desk-2, attic-1], d2d_rate_bps: 2.0e7, hop_latency_s: 0.01}
      - {between: [desk-2, attic-2], d2d_rate_bps: 2.0e7, hop_latency_s: 0.01}
"""


def test_a_plan_crosses_the_slow_link_between_two_rooms_once(
    command: Command, tmp_path: Path
) -> None:
    """The table shows the time of this hop."""
    file, chart = written(tmp_path, ROOMS), tmp_path / "plan.svg"
    cluster = json.loads(command(file, "--json")[1])["clusters"][0]
    order = [each["device"] for each in cluster["segments"]]
    assert [name.partition("-")[0] for name in order] in (
        ["desk"] * 2 + ["attic"] * 2,
        ["attic"] * 2 + ["desk"] * 2,
    )
    assert cluster["gap"] == 0.0
    out = " ".join(command(file, "--plot", str(chart))[1].split())
    hop_s = 2.0e6 * 16 / cluster["num_micro_batches"] / 2.0e7 + 0.01
    assert f"links 1 of 4 in use: {order[1]} to {order[2]}" in out
    assert f"{order[1]}, sending {seconds(hop_s)} per micro-batch" in out
    without = json.loads(command(written(tmp_path, ROOMS.partition("    links")[0]), "--json")[1])
    names = [each["device"] for each in without["clusters"][0]["segments"]]
    assert names == ["desk-1", "attic-1", "desk-2", "attic-2"]


def test_a_shared_stage_has_rows_and_a_sync(command: Command, tmp_path: Path) -> None:
    """The fast device gets two thirds of the rows; JSON, table and chart show the shared stage."""
    file, chart = written(tmp_path, ADAPTERS), tmp_path / "plan.svg"
    cluster = json.loads(command(file, "--json", "--solver", "shared")[1])["clusters"][0]
    rows = {each["device"]: each["rows"] for each in cluster["segments"]}
    assert rows == {"fast": 8, "slow": 4}
    assert (cluster["num_segments"], cluster["gap"]) == (1, 0.0)
    out = " ".join(command(file, "--solver", "shared", "--plot", str(chart))[1].split())
    assert "0-3, 8 rows of 12" in out
    assert "no pipeline, with shared stages or without, is faster under this law (gap 0)" in out
    assert "sync 3.20 ms after a batch" in out
    assert "adding the gradients of a shared stage" in chart.read_text()


def test_the_default_mentions_a_faster_plan_with_shared_stages(
    command: Command, tmp_path: Path
) -> None:
    """The last line has the time of the plan that ``--solver shared`` prints."""
    file = written(tmp_path, ADAPTERS)
    exact, shared = (
        json.loads(command(file, "--json", "--solver", name)[1])["clusters"][0]["latency_s"]
        for name in ("exact", "shared")
    )
    assert shared < 0.9 * exact
    last = " ".join(command(file)[1].strip().splitlines()[-1].split())
    expected = f"{seconds(shared)} ({shared / exact - 1:.0%}) with stages that devices share"
    assert last == f"sharing {expected}: --solver shared"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (ADAPTERS, ["--solver", "shared"]),
        (ADAPTERS, ["--solver", "gpipe"]),
        pytest.param(
            f"{ADAPTERS}    uplink: {{power_w: 0.5, energy_j: 10, upload_bits: 4.7e6, "
            f"gain_db: [-0.1]}}\n{CHANNEL}",
            [],
            id="round",
        ),
        pytest.param(ADAPTERS.replace("1.0e4}", "1.0e9}"), [], id="slow sync"),
        pytest.param(ADAPTERS.replace(", trained_bytes: 1.0e4", ""), [], id="no law"),
        pytest.param(
            ADAPTERS
            + "".join(
                f"      - {{name: n{k}, flops_per_s: {k}.0e9, d2d_rate_bps: 1.0e8}}\n"
                for k in (1, 3, 5, 6, 7)
            ),
            [],
            id="seven different devices",
        ),
    ],
)
def test_a_plan_that_is_not_faster_or_slow_to_find_is_not_mentioned(
    command: Command, tmp_path: Path, text: str, options: list[str]
) -> None:
    assert "with stages that devices share" not in command(written(tmp_path, text), *options)[1]


def test_a_device_needs_memory_for_the_gradients_that_it_receives(
    command: Command, tmp_path: Path
) -> None:
    """If gradients needed no memory, the slow device would get four rows and not three."""
    text = ADAPTERS.replace("1.0e4}", "2.0e5, block_bytes: 1.0e6}")
    text = text.replace("fast, ", "fast, memory_bytes: 5.0e6, ")
    file = written(tmp_path, text.replace("slow, ", "slow, memory_bytes: 4.3e6, "))
    out = command(file, "--solver", "shared")[1]
    assert re.search(r"fast\s+0-3, 9 rows of 12\s+4\.75 of 5 MB", out)
    assert re.search(r"slow\s+0-3, 3 rows of 12\s+4\.25 of 4\.3 MB", out)


def test_missing_figures_for_shared_stages_are_explained(command: Command, tmp_path: Path) -> None:
    file = written(tmp_path, ADAPTERS.replace(", trained_bytes: 1.0e4", ""))
    out = " ".join(command(file, "--solver", "shared")[1].split())
    assert "no stage can be shared: devices need d2d_rate_bps" in out


def test_a_round_that_prices_segments_refuses_shared_stages(
    command: Command, tmp_path: Path
) -> None:
    priced = JOINT + "round: {segment_price: paper}\n"
    code, _, err = command(written(tmp_path, priced), "--solver", "shared")
    assert code
    assert "round.segment_price=none" in err


def test_the_blocks_named_in_an_error_fit_into_the_devices_memory(
    command: Command, tmp_path: Path
) -> None:
    """The error gives a number of blocks, a memory and the bytes of a block for each device."""
    devices = (f"{{name: {n}, flops_per_s: 1e10, memory_bytes: {n[1:]}e6}}" for n in ("a60", "b61"))
    text = "batch_size: 64\nmodel: {name: transformer, num_blocks: 12, tokens: 40}\n"
    text += f"clusters: [{{name: workshop, devices: [{', '.join(devices)}]}}]\n"
    status, _, err = command(written(tmp_path, text.replace("1e10,", "1e10, d2d_rate_bps: 1e8,")))
    limits = re.findall(r": (\d) by memory_bytes (\S+) \(at least ([\d.]+) MB a block\)", err)
    assert (status, len(limits)) == (2, 2), err
    for held, memory, block in limits:
        assert float(held) * float(block) * 1e6 <= float(memory)
