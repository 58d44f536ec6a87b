"""``collapipe device measure``: measure the laws of an inventory's devices, and write them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console

from collapipe.cli.device.laws import MeasuredDevice, Measuring
from collapipe.cli.device.survey import ANSWER_S, own_credentials
from collapipe.cli.device.trial_round import Trial
from collapipe.errors import ConfigError, printable
from collapipe.formatting import amount, counted, print_lines, print_table, seconds
from collapipe.inventory.model import TOKENS, read_spec
from collapipe.inventory.rewriting import write_laws
from collapipe.inventory.schema import InventorySection, ModelSection
from collapipe.inventory.yaml_file import Document, load
from collapipe.models.cost import measure_cost
from collapipe.models.split import ModelSpec
from collapipe.wire.channels import Dialer

_COLUMNS = ("device", "u", "v", "off", "w", "l", "off")


def measure_devices(file: Path, model: str | None, repeats: int, write: bool) -> int:
    """Measure and print each device's law, and with ``write`` put the laws into the file.

    Returns 1 if a device could not be measured, else 0. Raises ``ConfigError`` for an invalid file,
    model or credentials.
    """
    document = load(file)
    section = document.parse(InventorySection)
    tokens = section.model.tokens or TOKENS
    spec = _spec(document, section.model, model)
    cost = measure_cost(spec, tokens, section.batch_size)
    trial = Trial(spec, cost, tokens, section.batch_size, repeats)
    dialer = Dialer(own_credentials(file, section), ANSWER_S)
    measuring = Measuring(dialer, trial, lambda line: print(line, file=sys.stderr, flush=True))
    found = measuring.laws(section)
    _show(found, trial)
    laws = {(each.device.cluster, each.device.name): each.law for each in found}
    known = {key: law for key, law in laws.items() if law is not None}
    if write and known:
        write_laws(file, known)
        print(
            f"written     {counted(len(known), 'law')} to {file}; collapipe plan {quote(str(file))}"
        )
    for fault in (each.fault for each in found if each.fault):
        print(f"error: {printable(fault)}; its law stays as it is", file=sys.stderr)
    return 0 if len(known) == len(found) else 1


def _spec(document: Document, section: ModelSection, name: str | None) -> ModelSpec:
    """Return the model with this name, or without a name the file's model."""
    if name is None:
        return read_spec(document, section)
    try:
        named = ModelSection.model_construct(name=name, num_blocks=section.num_blocks)
        return read_spec(document, named)
    except ConfigError as error:
        raise ConfigError(f"--model {name}: {error}") from error


def _show(found: Sequence[MeasuredDevice], trial: Trial) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    print_table(console, _COLUMNS, [(each.device.name, *_law(each)) for each in found])
    least, most = trial.samples
    lines = [
        ("u, v", f"a block's seconds of a sample and of a micro-batch, of {least} and {most}"),
        ("w, l", "a hop's, there and back; the last device's leads to the control unit"),
        ("off", "how far the law is from what was measured: root mean square"),
        ("sample", f"{trial.tokens} tokens, {amount(trial.cost.activation_bits / 8, 'B')}"),
        ("as it is", "control_unit, uplinks, channels and limits, which are not measured"),
    ]
    print_lines(console, lines)


def _law(each: MeasuredDevice) -> tuple[str, ...]:
    law = each.law
    if law is None:
        return ("fails", *"-----")
    return (
        *(seconds(law.u), seconds(law.v), f"{each.compute_error:.1%}"),
        *(seconds(law.w), seconds(law.ell), f"{each.hop_error:.1%}"),
    )
