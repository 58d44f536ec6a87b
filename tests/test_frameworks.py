"""All frameworks and strategies train through the same apps, and differ only as specified."""

from pathlib import Path

import pytest
import torch
from federated import play
from run_files import rounds_of, summary_of
from safetensors.torch import load_file

from collapipe.config import load_overrides
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.runs.model import load_model

WORLD = (
    "cluster=paper",
    "channel=paper",
    "environment=fading",
    "pipeline.dtype=float64",
    "model.dropout=0",
    "federation.local_steps=1",
    "strategy.latency=bound",
    "strategy.energy=adapters",
)
FRAMEWORKS = ("collapipe", "collapipe_no_ss", "vanilla_fl", "pipeline", "titanic", "splitfed")
STRATEGIES = (
    "dssra",
    *(
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("dssra_paper", "random", "loss_only", "delay_only", "all")
    ),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train a run of each framework; with three units and four channels, all units take part."""
    folder = tmp_path_factory.mktemp("frameworks")
    for name in FRAMEWORKS:
        play(folder / name, *WORLD, f"framework={name}", "federation.rounds=1")
    return {name: folder / name for name in FRAMEWORKS}


@pytest.mark.parametrize("name", ["collapipe_no_ss", "vanilla_fl", "titanic"])
def test_the_placement_of_blocks_does_not_change_weights(name: str, runs: dict[str, Path]) -> None:
    one, other = (load_file(runs[each] / "model" / "model.safetensors") for each in (name, FIRST))
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-9)


FIRST = "collapipe"


def test_each_framework_places_blocks_as_specified(runs: dict[str, Path]) -> None:
    for line in rounds_of(runs["titanic"]) + rounds_of(runs["pipeline"]):
        assert all(cluster["segments"] for cluster in line["plan"]["clusters"])
    for line in rounds_of(runs["pipeline"]):
        for cluster in line["plan"]["clusters"]:  # four blocks, one each on the first four of six
            held = [(each["device"], each["span"]["blocks"]) for each in cluster["segments"]]
            assert held == [(f"device-{k}", 1) for k in range(4)]
    for line in rounds_of(runs["vanilla_fl"]):
        assert all(cluster["segments"] == [] for cluster in line["plan"]["clusters"])
    for line in rounds_of(runs["splitfed"]):
        for cluster in line["plan"]["clusters"]:
            assert [each["span"]["blocks"] for each in cluster["segments"]] == [1]


def test_vanilla_fl_devices_makes_each_device_a_unit(tmp_path: Path) -> None:
    settings = load_overrides([*WORLD, "framework=vanilla_fl_devices"])
    assert (settings.federation.num_units, settings.channel.num_channels) == (18, 18)
    given = ("framework=vanilla_fl_devices", "federation.num_units=5", "channel.num_channels=5")
    play(tmp_path, *WORLD, *given)
    for line in rounds_of(tmp_path):
        assert line["units"] == [0, 1, 2, 3, 4]
        assert all(cluster["segments"] == [] for cluster in line["plan"]["clusters"])
        assert all(len(cost["device_energy_j"]) == 1 for cost in line["cost"]["clusters"])


def test_upload_times_depend_on_the_framework(runs: dict[str, Path]) -> None:
    """All runs have the same channels; only the uploaded data differ."""
    uploads = {
        name: [cost["upload_s"] for line in rounds_of(path) for cost in line["cost"]["clusters"]]
        for name, path in runs.items()
    }
    for name in ("collapipe_no_ss", "titanic", "splitfed"):
        assert max(uploads[name]) > 30  # the activations of Table II
    assert max(uploads["vanilla_fl"]) < 0.3 * max(uploads["collapipe"])
    assert max(uploads["pipeline"]) < max(uploads["collapipe"])  # no weights


def test_without_aggregation_each_unit_has_its_own_model(runs: dict[str, Path]) -> None:
    folder = runs["pipeline"]
    assert not (folder / "model" / "model.safetensors").exists()
    models = [load_file(folder / "model" / f"unit-{unit}.safetensors") for unit in range(3)]
    assert not any(torch.equal(models[0][k], models[1][k]) for k in models[0] if "weight" in k)
    metric = summary_of(folder)["metric"]
    assert "mean of 3 units' models" in metric["signature"]
    with pytest.raises(ConfigError, match="unit"):
        load_model(folder)
    load_model(folder, unit=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_in_a_mobile_environment(strategy: str, tmp_path: Path) -> None:
    units = ("federation.num_units=4", "channel.num_channels=2", "federation.on_infeasible=skip")
    play(tmp_path, *WORLD, *units, "environment=mobile", f"strategy={strategy}")
    for line in rounds_of(tmp_path):
        scheduled = [cluster["unit"] for cluster in line["plan"]["clusters"]]
        assert line["units"] == scheduled
        assert len(scheduled) <= (4 if strategy == "all" else 2)
        assert line["cost"]["delay_s"] > 0
        assert bool(line["plan"]["queues"]) == strategy.startswith("dssra")
    assert rounds_of(tmp_path)[-1]["train_loss"] > 0


def test_scheduling_without_training_has_the_same_costs(tmp_path: Path) -> None:
    play(tmp_path / "trained", *WORLD)
    play(tmp_path / "scheduled", *WORLD, "framework.train=false")
    trained, scheduled = (rounds_of(tmp_path / name) for name in ("trained", "scheduled"))
    assert [line["cost"] for line in trained] == [line["cost"] for line in scheduled]
    assert [line["clock_s"] for line in trained] == [line["clock_s"] for line in scheduled]
    assert [line["queues"] for line in trained] == [line["queues"] for line in scheduled]
    assert all(line["train_loss"] is None and line["samples"] == 0 for line in scheduled)
    assert summary_of(tmp_path / "scheduled")["metric"] is None


@pytest.mark.parametrize("train", [True, False])
def test_a_run_whose_rounds_are_all_skipped_fails(tmp_path: Path, train: bool) -> None:
    skips = "federation.on_infeasible=skip", "channel.energy_j=1e-9"
    what = "learned" if train else "planned"
    with pytest.raises(RoundFailedError, match=rf"^nothing was {what}: all rounds \(\d\) were sk"):
        play(tmp_path / "run", *WORLD, *skips, f"framework.train={train}")
