"""Losses of a run of one unit and of a plain peft loop with the same batches and seeds."""

from argparse import ArgumentParser, Namespace
from statistics import fmean

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from benchmarks.language_models.peft_loop import peft_loop
from benchmarks.language_models.runs import add_model, on_conversations, run

_STEPS = 10  # of a round; mean losses of rounds are compared


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for the model and the number of steps."""
    add_model(parser)
    parser.add_argument("--steps", type=at_least(1), default=200)


def main(arguments: Namespace) -> None:
    options = [
        *on_conversations(arguments, rows=1000, tokens=96, batch=4),
        f"federation.rounds={arguments.steps // _STEPS}",
        f"federation.local_steps={_STEPS}",
    ]
    rounds = run(arguments.output / "learning", options)
    ours = [each["train_loss"] for each in rounds]
    steps = peft_loop(arguments.output / "learning-peft.json", arguments.threads, options)
    each_round = range(0, len(steps), _STEPS)
    theirs = [fmean(step["loss"] for step in steps[at : at + _STEPS]) for at in each_round]
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    for number, row in enumerate(zip(ours, theirs, differences, strict=True), 1):
        print(f"round {number:>3}  collapipe {row[0]:.6f}  peft {row[1]:.6f}  apart {row[2]:.1e}")
    print(f"largest difference {max(differences):.1e} in {len(steps)} steps")
    result = {"about": about(arguments), "options": options, "collapipe": ours, "peft": theirs}
    save(arguments.output, "learning", result)
