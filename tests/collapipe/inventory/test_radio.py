"""A run uses the channels and uplinks of an inventory."""

from pathlib import Path

import federated
import numpy as np
import pytest
from run_files import rounds_of

from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import InventoryChannel
from collapipe.inventory.file import read_inventory

JOINT = Path("docs/examples/joint-round.yaml")
FILE = "cluster=file", f"cluster.file={JOINT}", "channel=file", "federation.num_units=3"


def test_units_have_the_files_uplinks_and_the_runs_own_bits() -> None:
    inventory = read_inventory(JOINT)
    channel = load_overrides(FILE).channel
    assert isinstance(channel, InventoryChannel)
    rng = np.random.default_rng(0)
    assert channel.draw(rng) == inventory.channels
    for unit, given in enumerate(inventory.uplinks):
        found = channel.draw_uplink(3e6, 4e6, rng, unit=unit)
        for name in ("max_power_w", "energy_j", "gains"):
            assert getattr(found, name) == getattr(given, name)
        assert (found.model_bits, found.activation_bits, found.payloads) == (3e6, 4e6, ())
    alone = channel.draw_uplink(3e6, 4e6, rng, 50.0, 7, unit=3)
    assert alone.gains == inventory.uplinks[0].gains


def test_a_run_is_scheduled_with_the_files_channels_and_uplinks(tmp_path: Path) -> None:
    federated.play(tmp_path, *FILE, "model.num_blocks=4", "strategy.energy=adapters")
    lines = rounds_of(tmp_path)
    inventory = read_inventory(JOINT)
    for line in lines:
        planned = line["plan"]["clusters"]
        assert 0 < len(planned) <= len(inventory.channels)
        for each in planned:
            most = inventory.uplinks[each["unit"]].max_power_w
            assert 0 < each["uplink"]["power_w"] <= most


def test_a_file_without_channels_is_refused() -> None:
    file = "cluster.file=docs/examples/workshop.yaml"
    with pytest.raises(ConfigError, match=r"workshop\.yaml has no channels"):
        load_overrides(["cluster=file", file, "channel=file", "federation.num_units=1"])
