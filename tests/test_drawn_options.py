"""With options drawn at random, a resumed run equals an uninterrupted one, and real devices equal
simulated ones, also after a loss. Options that contradict each other are drawn again."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import federated
import pytest
from device_cluster import daemons
from resumed import World, differing, outcome, tensors
from test_devices import STEADY, assert_same, ending, inventory, run_on_devices
from thorough import seeds
from torch import Tensor

from client_app.devices import round_pipeline
from collapipe.errors import CollaPipeError

Run: TypeAlias = Callable[[Path, Sequence[str]], dict[str, Tensor]]
_TRIES, _MOST = 20, 7
# One of each row, or none; those of a row that need each other are one text.
PIPELINES = (
    ("pipeline=gpipe", "pipeline.schedule=auto"),
    ("pipeline.num_micro_batches=1", "pipeline.num_micro_batches=3"),
    ("pipeline.recompute=true", "pipeline.recompute=false"),
    ("pipeline.num_segments=1", "pipeline.num_segments=2"),
    ("pipeline.dtype=float64",),
    ("decoder.mode=control_unit", "decoder.mode=auto"),
    ("adapter=lora adapter.rank=2", "adapter=lora adapter.last_blocks=2", "model.norm=post"),
    ("optimizer=sgd", "optimizer.state=reset", "optimizer.clip_norm=null"),
    ("compression=int8", "compression=int4", "compression=bfloat16", "compression=auto"),
    ("compression.gradient=int4", "compression.feedback=true"),
    ("strategy.latency=flow_shop", "strategy.latency=bound"),
    ("federation.weighting=uniform", "federation.channel_noise=0.01"),
)
LINKS = (
    ("pipeline.relay=true",),
    tuple(f"pipeline.replicate_every={steps}" for steps in range(3)),
)
FEDERATIONS = (
    *PIPELINES,
    ("pipeline.wire_dtype=int8", "pipeline.wire_dtype=bfloat16"),
    ("framework=pipeline", "framework=splitfed", "framework=titanic", "framework=vanilla_fl"),
    ("strategy=random", "strategy=delay_only", "strategy=even", "strategy=dssra_paper"),
    ("server_optimizer=fedadam", "server_optimizer=fedavgm", "server_optimizer.average=median"),
    ("environment=fading", "environment=mobile", "environment=jitter"),
    ("cluster=edge", "cluster=paper", "cluster.num_devices=1", "channel.num_channels=1"),
    ("evaluation.where=units", "evaluation.where=both"),
    ("privacy.clip_norm=1 decoder.mode=control_unit", "privacy=private privacy.noise_seed=3"),
)


@pytest.mark.parametrize("seed", seeds(0, 30))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, seed: int) -> None:
    def run(folder: Path, options: Sequence[str]) -> dict[str, Tensor]:
        return tensors(World(folder, *options).run(folder))

    whole, options, expected = accepted(tmp_path, random.Random(seed), FEDERATIONS, run)
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    World(again, *options).run(again, "000002")
    assert differing(tensors(again), expected) == []
    assert outcome(again) == outcome(whole)


@pytest.mark.parametrize("seed", seeds(0, 30))
def test_devices_equal_simulated_ones_also_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(round_pipeline, "without_devices", lambda *_: None)  # depends on the load
    draws = random.Random(seed)
    with daemons(4) as there:
        file = inventory(tmp_path / "here.yaml", there)

        def simulated(folder: Path, options: Sequence[str]) -> dict[str, Tensor]:
            return federated.run(folder, "cluster=file", f"cluster.file={file}", *STEADY, *options)

        _, options, expected = accepted(tmp_path, draws, (*PIPELINES, *LINKS), simulated)
        own = file, *STEADY, *options
        assert_same(run_on_devices(tmp_path / "real", *own), expected)
        lost = draws.randrange(2)  # every plan has the first two devices
        with ending(there[lost], at=draws.randint(1, 4)):
            found = run_on_devices(tmp_path / "lost", *own, lost=[f"device-{lost}"])
        assert_same(found, expected)


def accepted(
    tmp_path: Path, draws: random.Random, groups: Sequence[Sequence[str]], run: Run
) -> tuple[Path, list[str], dict[str, Tensor]]:
    """Run with options that do not contradict each other, of ``_MOST`` groups at most. Return the
    run's folder, the options and the weights."""
    for number in range(_TRIES):
        chosen = map(draws.choice, draws.sample(groups, draws.randint(3, _MOST)))
        folder, options = tmp_path / f"try-{number}", " ".join(chosen).split()
        try:
            return folder, options, run(folder, options)
        except CollaPipeError as error:
            refused = error
    raise AssertionError(f"no options of {_TRIES} draws were accepted") from refused
