"""A federation small enough for tests, in this process."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from safetensors.torch import load_file
from torch import Tensor

from collapipe import config
from collapipe.config import Settings
from collapipe.flower.inline_grid import InlineGrid
from collapipe.models.transformer import Decoder
from collapipe.runs.model import load_model
from server_app import training
from server_app.records import shard_picture

TINY = (
    "task.train_rows=40",
    "task.validation_rows=4",
    "task.test_rows=4",
    "task.vocabulary=300",
    "task.max_length=40",
    "model.num_blocks=4",
    "model.num_decoder_blocks=1",
    "model.dim=16",
    "model.num_heads=2",
    "model.feed_forward_dim=16",
    "batch_size=6",
    "optimizer.warmup_steps=0",
    "pipeline.num_micro_batches=2",
    "federation.rounds=2",
    "federation.local_steps=2",
    "federation.eval_every=9",
    "federation.checkpoint_every=0",
)
MOST_TOKENS = 8  # per prediction
# 40 rows in the proportion 1 : 2 : 3
UNEVEN = "data.partitioner._target_=flwr_datasets.partitioner.LinearPartitioner"


@contextmanager
def rewritten(reply: Message) -> Iterator[dict[str, Any]]:
    """Yield the fields of a unit's reply; changes to them take effect before the server reads the
    reply."""
    record = cast(ConfigRecord, reply.content["UnitReply"])
    fields = json.loads(str(record["json"]))
    yield fields
    record["json"] = json.dumps(fields)


def settings_of(run_dir: Path, overrides: Sequence[str]) -> Settings:
    """Return the settings of a tiny run."""
    return config.load_overrides([*TINY, *overrides, f"hydra.run.dir={run_dir}"])


def run(run_dir: Path, *overrides: str, client: ClientApp | None = None) -> dict[str, Tensor]:
    """Train and return the global weights; ``client`` stands in for the real ClientApp."""
    play(run_dir, *overrides, client=client)
    return weights(run_dir)


def play(run_dir: Path, *overrides: str, client: ClientApp | None = None) -> None:
    """Train a run, which need not produce a global model."""
    settings = settings_of(run_dir, overrides)
    train(grid_of(settings, client), settings)


def train(grid: Grid, settings: Settings, resume: str | None = None) -> None:
    """Train without two steps that take a third of a tiny run's time. No picture of the shards is
    drawn, and evaluations generate at most ``MOST_TOKENS`` tokens per prediction."""
    with (
        patch.object(shard_picture, "draw", lambda *arguments: arguments[-1].touch()),
        patch.object(Decoder, "generate", _begin_to_generate),
    ):
        training.train(grid, settings, resume)


_generate = Decoder.generate


def _begin_to_generate(
    decoder: Decoder, hidden: Tensor, mask: Tensor, max_length: int
) -> list[list[int]]:
    return _generate(decoder, hidden, mask, min(max_length, MOST_TOKENS))


def grid_of(settings: Settings, client: ClientApp | None = None) -> InlineGrid:
    """Return the grid that a run uses."""
    from client_app.app import app

    return InlineGrid(client or app, settings.federation.num_units)


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return a run's global weights, including the frozen weights."""
    if json.loads((run_dir / "model" / "base.json").read_text()):
        return load_model(run_dir)[1].state_dict()
    return load_file(run_dir / "model" / "model.safetensors")
