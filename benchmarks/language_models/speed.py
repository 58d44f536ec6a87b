"""Tokens per second of LoRA in one process, and of a plain peft loop with the same number of
threads."""

import statistics
from argparse import ArgumentParser, Namespace

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, ratio, save
from benchmarks.language_models.peft_loop import peft_loop
from benchmarks.language_models.runs import add_model, on_conversations, run

_ROUNDS, _STEPS, _BATCH, _TOKENS = 3, 2, 8, 256  # the first round does not count


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for the model and turns."""
    add_model(parser)
    parser.add_argument("--turns", type=at_least(1), default=3)


def main(arguments: Namespace) -> None:
    options = [
        *on_conversations(arguments, rows=1500, tokens=_TOKENS, batch=_BATCH),
        "pipeline.num_micro_batches=4",
        f"federation.rounds={_ROUNDS}",
        f"federation.local_steps={_STEPS}",
    ]
    speeds: dict[str, list[float]] = {"collapipe": [], "peft": []}
    for turn in range(arguments.turns):
        rounds = run(arguments.output / f"speed-{turn}", options)[1:]
        seconds = sum(each["seconds"]["round"] for each in rounds)
        speeds["collapipe"].append(sum(each["target_tokens"] for each in rounds) / seconds)
        file = arguments.output / f"speed-{turn}.json"
        steps = peft_loop(file, arguments.threads, options)[_STEPS:]
        seconds = sum(each["seconds"] for each in steps)
        speeds["peft"].append(sum(each["tokens"] for each in steps) / seconds)
        print(*(f"{side} {each[-1]:.1f} tokens/s" for side, each in speeds.items()), flush=True)
    for side, found in speeds.items():
        print(f"{side:<10} {statistics.median(found):>8.1f} tokens/s in the median")
    print(f"collapipe / peft {ratio(speeds['collapipe'], speeds['peft'])}")
    save(arguments.output, "speed", {"about": about(arguments), "options": options, **speeds})
