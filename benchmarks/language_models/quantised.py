"""Loss after an epoch with the frozen weights in float32, int8 and nf4, paired by seed."""

from argparse import ArgumentParser, Namespace

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from benchmarks.language_models.paired import paired
from benchmarks.language_models.peft_loop import examples_of
from benchmarks.language_models.runs import add_model, on_conversations
from collapipe.config import load_overrides
from collapipe.runs.rows import build_tokenizer

_BATCH = 8


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for the model, its quantisation, rows and seeds."""
    add_model(parser)
    parser.add_argument("--rows", type=at_least(1), default=1000)
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--kept", nargs="*", default=["int8", "nf4"], help="besides float32")


def main(arguments: Namespace) -> None:
    shared = on_conversations(arguments, arguments.rows, tokens=96, batch=_BATCH)
    settings = load_overrides(shared)
    samples = len(examples_of(settings, build_tokenizer(settings)).lengths)
    shared += ["federation.rounds=1", f"federation.local_steps={samples // _BATCH}"]
    narrow = {side: [f"model.quantization={side}"] for side in arguments.kept}
    losses = paired(arguments, shared, {"float32": [], **narrow})
    result = {"about": about(arguments), "options": shared, "test_loss": losses}
    save(arguments.output, "quantised", result)
