"""Where to train a head: on the edge server, on its control unit, or as the scheduler decides.

    python -m benchmarks.head_place --seeds 20

Scheduled rounds (``framework.train=false``) of three clusters of Table II, with BERT-base's sizes
and adapters of rank 8. The heads predict a label for a text, a label for each token, or a
translation with decoders of one and six blocks. Control units are as fast as a mean device of Table
II, or faster. Bits are those that the model really sends. Prints the mean seconds of a round, and
how often ``decoder.mode=auto`` places the head on the control unit. Writes ``head_place.json``.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.arguments import at_least, writable
from client_app.cluster_state import cluster_state
from collapipe import config
from collapipe.runs.rows import build_tokenizer, load_shards
from reproduction.scheduling import Overrides
from server_app.planning.scheduler import Scheduler
from server_app.rounds.results import dry_run

MODES = "per_cluster", "control_unit", "auto"
SPEEDS = 1, 10, 100  # of a control unit, relative to a mean device of Table II
ROUNDS = 5
_FLOPS_PER_S = 7.65e6  # conf/cluster/paper.yaml
_WORLD: Overrides = (
    "cluster=paper",
    "channel=paper",
    "framework.train=false",
    "batch_size=64",
    "pipeline.num_micro_batches=64",
    "federation.local_steps=1",
    "strategy=all",
    "strategy.latency=bound",
    "channel.model_bits=null",
    "channel.activation_bits=null",
    "environment=static",
    "adapter=lora",
)
_BERT: Overrides = (
    "model=huggingface",
    "model.family=bert",
    "model.config={num_hidden_layers: 12}",  # BERT base's sizes are the defaults
    "task.vocabulary=500",
)
_SIZES: Overrides = (
    "model.num_blocks=12",
    "model.dim=768",
    "model.num_heads=12",
    "model.feed_forward_dim=3072",
    "task.train_rows=640",
)


def heads(folder: Path) -> dict[str, Overrides]:
    """Write rows of the tasks to ``folder``; return the options of each kind of head."""
    texts, tokens = folder / "texts.jsonl", folder / "tokens.jsonl"
    texts.write_text("".join(f'{{"text": "{_words(n)}", "label": {n % 15}}}\n' for n in range(640)))
    tokens.write_text("".join(json.dumps(_tagged(n)) + "\n" for n in range(640)))
    decoder = "model.num_decoder_blocks"
    return {
        "a label for a text": ("task=classification", *_rows(texts), *_BERT),
        "a label for each token": ("task=ner", *_rows(tokens), *_BERT),
        "decoder of one block": (*_SIZES, f"{decoder}=1"),
        "decoder of six blocks": (*_SIZES, f"{decoder}=6"),
    }


def _rows(file: Path) -> Overrides:
    return "data=default", f"data.train_file='{file}'", "task.max_length=64"


def _words(number: int) -> str:
    return " ".join(f"w{(number * 7 + place) % 90}" for place in range(20 + number % 20))


def _tagged(number: int) -> dict[str, list[str]]:
    words = _words(number).split()
    return {"tokens": words, "ner_tags": [("O", "B-X")[len(word) % 2] for word in words]}


def play(options: Overrides, seeds: int) -> tuple[list[float], float]:
    """Seconds of the rounds of all seeds, and the share of heads on control units."""
    first = config.load_overrides([*_WORLD, *options])
    tokenizer = build_tokenizer(first)
    shards = [first.task.encode(shard, tokenizer) for shard in load_shards(first)]
    seconds, there = list[float](), list[bool]()
    for seed in range(seeds):
        settings = replace(first, seed=seed, tree={**first.tree, "seed": seed})
        states = [
            cluster_state(settings, unit, shard, tokenizer.vocabulary)
            for unit, shard in enumerate(shards)
        ]
        scheduler = Scheduler(settings)
        start = scheduler.begin(states)
        for each, _ in dry_run(settings, scheduler, start, range(1, ROUNDS + 1)):
            seconds.append(each.report.cost.delay_s)
            uplinks = (cluster.uplink for cluster in each.report.plan.clusters)
            there += [settings.unit_has_head(uplink) for uplink in uplinks]
    return seconds, fmean(there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/head_place"))
    parser.add_argument("--seeds", type=at_least(1), default=20)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = []
    print(f"{'head':<24}{'speed':>6}" + "".join(f"{mode:>14}" for mode in MODES) + "   on units")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in heads(Path(folder)).items():
            for speed in SPEEDS:
                law = f"cluster.control_unit_flops_per_s={speed * _FLOPS_PER_S}"
                means, share = [], 0.0
                for mode in MODES:
                    world = (*options, law, f"decoder.mode={mode}")
                    seconds, share = play(world, arguments.seeds)
                    means.append(fmean(seconds))
                print(
                    f"{name:<24}{speed:>6}"
                    + "".join(f"{mean:>14.2f}" for mean in means)
                    + f"{share:>11.0%}",
                    flush=True,
                )
                found.append(
                    {
                        "head": name,
                        "speed": speed,
                        **dict(zip(MODES, means, strict=True)),
                        "on_units": share,
                    }
                )
    written = {"seeds": arguments.seeds, "rounds": ROUNDS, "world": _WORLD, "found": found}
    (arguments.output / "head_place.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
