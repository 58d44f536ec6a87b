"""Test loss of three units, and of one unit with all rows and batches three times as large,
paired by seed."""

from argparse import ArgumentParser, Namespace

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from benchmarks.language_models.paired import paired
from benchmarks.language_models.runs import add_model, on_conversations

_UNITS, _BATCH, _STEPS = 3, 4, 10  # units, samples of a unit's batch, and its steps in a round


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for the model, steps and seeds."""
    add_model(parser)
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--seeds", type=at_least(1), default=3)


def main(arguments: Namespace) -> None:
    shared = on_conversations(arguments, rows=1000, tokens=96, batch=_BATCH)
    shared += [
        f"federation.rounds={arguments.steps // _STEPS}",
        f"federation.local_steps={_STEPS}",
    ]
    sides = {
        "one": [f"batch_size={_UNITS * _BATCH}"],
        "three": [f"federation.num_units={_UNITS}"],
    }
    losses = paired(arguments, shared, sides)
    save(arguments.output, "units", {"about": about(arguments), "options": shared, **losses})
