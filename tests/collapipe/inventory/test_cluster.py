"""A run takes its clusters from an inventory: unit n gets cluster n, with the run's model."""

import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from collapipe import config
from collapipe.cli.run import run_job
from collapipe.config import Settings
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import InventoryCluster
from collapipe.inventory.file import read_inventory
from collapipe.inventory.planning import plan_inventory
from collapipe.state import AffineLaw, BlockCost, DeviceProfile
from server_app import training

EXAMPLE = Path(__file__).parents[3] / "docs/examples/joint-round.yaml"
COST = BlockCost(9e8, 18e8, 1.5e6, 1.5e6, 1.2e8)


def drawn(cost: BlockCost, unit: int, file: Path = EXAMPLE) -> tuple[DeviceProfile, ...]:
    return InventoryCluster(str(file), unit + 1).draw(cost, unit, np.random.default_rng(0))


def test_units_have_the_clusters_of_the_file_in_order() -> None:
    names = [[device.name for device in drawn(COST, unit)] for unit in range(3)]
    assert names == [["jetson", "laptop"], ["mini-pc", "pi-5", "pi-4"], ["pi-5"]]


def test_a_devices_law_is_computed_for_the_runs_model() -> None:
    jetson = drawn(COST, 0)[0]
    assert jetson.time == AffineLaw(27e8 / 4e11, 0.003, 3e6 / 9.4e8, 0.0)
    assert jetson.memory_cap(1, 99) == int(4.5e8 // 1.2e8)
    twice = drawn(BlockCost(18e8, 36e8, 3e6, 3e6, 2.4e8), 0)[0]
    assert (twice.time.u, twice.time.w) == (2 * jetson.time.u, 2 * jetson.time.w)
    assert twice.memory_cap(1, 99) == 1


def test_a_measured_device_keeps_its_measured_law() -> None:
    pi = drawn(COST, 1)[1]
    assert pi == DeviceProfile("pi-5", AffineLaw(0.022, 0.003, 0.0023, 0.002), 6)


@pytest.mark.parametrize(
    ("key", "measured", "serves"),
    [
        ("block_flops", 2.7e9, True),
        ("block_flops", 2.7e9 / 1.2, True),
        ("block_flops", 2.7e9 * 15, False),
        ("hop_bits", 3e6, True),
        ("hop_bits", 3e6 / 1.4, False),
    ],
)
def test_a_law_measured_with_another_model_is_refused(
    key: str, measured: float, serves: bool, tmp_path: Path
) -> None:
    """Runs and plans both refuse such a law; laws in other units' clusters do not matter."""
    text = EXAMPLE.read_text().replace("name: transformer", f"num_blocks: 6\n{figures()}")
    file = tmp_path / "inventory.yaml"
    file.write_text(text.replace("{u: 0.022,", f"{{u: 0.022, {key}: {measured},"))
    drawn(COST, 0, file)
    with nullcontext() if serves else pytest.raises(ConfigError) as refused:
        drawn(COST, 1, file)
    with nullcontext() if serves else pytest.raises(ConfigError, match=f"chunk.{key}="):
        plan_inventory(read_inventory(file), "exact")
    if refused is not None:
        assert re.search(rf":\d+: clusters\[1\]\.devices\[1\]\.chunk\.{key}=", str(refused.value))
        assert f"collapipe device measure {file} " in str(refused.value)


def test_a_plan_and_a_run_see_the_same_devices_for_the_same_model(tmp_path: Path) -> None:
    # The file states the block's figures, so that they equal the run's figures.
    text = EXAMPLE.read_text().replace("name: transformer", f"num_blocks: 6\n{figures()}")
    file = tmp_path / "inventory.yaml"
    file.write_text(text)
    for unit, cluster in enumerate(read_inventory(file).clusters):
        assert drawn(COST, unit, file) == cluster.profiles


def figures() -> str:
    values = {name: getattr(COST, name) for name in COST.__dataclass_fields__}
    return "\n".join(f"  {name}: {figure:.17g}" for name, figure in values.items() if figure)


def test_a_run_takes_its_clusters_from_the_file() -> None:
    settings = config.load_overrides(["cluster=file", f"cluster.file={EXAMPLE}"])
    cluster = settings.build("cluster")
    assert (cluster.num_units, cluster.num_devices) == (3, 3)
    fewer = config.load_overrides(
        ["cluster=file", f"cluster.file={EXAMPLE}", "federation.num_units=1"]
    )
    assert fewer.build("cluster").num_devices == 2  # of the largest cluster that is used


def test_a_relative_path_of_an_inventory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Settings] = []
    monkeypatch.setattr(training, "train", lambda grid, settings, resume: trained.append(settings))
    monkeypatch.chdir(EXAMPLE.parent)
    run_job(["cluster=file", f"cluster.file={EXAMPLE.name}", f"hydra.run.dir={tmp_path}"])
    assert trained[0].tree["cluster"]["file"] == str(EXAMPLE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"cluster\.file\b"),
        (["cluster.file=none.yaml"], r"none\.yaml: "),
        (
            [f"cluster.file={EXAMPLE}", "federation.num_units=5"],
            r"^cluster\.file=\S+/joint-round\.yaml: .*\b3 of 5\b.*num_units=3$",
        ),
        (
            [f"cluster.file={EXAMPLE}", "pipeline.num_segments=4"],
            r"pipeline\.num_segments=4: .*cluster\.num_devices=3",
        ),
    ],
)
def test_an_unusable_inventory_is_refused_before_the_run_begins(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.load_overrides(["cluster=file", *overrides])
    assert "\n" not in str(caught.value)


def test_a_unit_without_a_cluster_in_the_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 of 8"):
        drawn(COST, 7)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops_per_s: 4.0e11", "flops_per_s: fast", r"inventory\.yaml:9: clusters\[0\]"),
        ("clusters:", "cluster:", r"inventory\.yaml:\d+: .*\bcluster\b.*\bclusters\b"),
        (
            "gain_db: [-0.1, -0.6]",
            "gain_db: [-0.1]",
            r"inventory\.yaml:11: clusters\[0\]\.uplink\.gain_db: .*\b1\b.*\b2\b",
        ),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text(EXAMPLE.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        InventoryCluster(str(file), 3)
