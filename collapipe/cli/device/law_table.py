"""Measured laws of devices and links, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from collapipe.formatting import amount, print_lines, print_table, seconds
from collapipe.inventory.rewriting import Key
from collapipe.state import AffineLaw, BlockCost

_COLUMNS = ("device", "u", "v", "off", "w", "l", "off")


@dataclass(frozen=True, slots=True)
class Measured:
    """The law of a device or a link with the relative errors of both fits, or the ``fault`` that
    prevented it. A link's law has no u and v."""

    key: Key
    law: AffineLaw | None = None
    compute_error: float = 0.0
    hop_error: float = 0.0
    fault: str | None = None


def show(found: Sequence[Measured], cost: BlockCost, tokens: int, taken: str) -> None:
    """Print a table of the laws; the text ``taken`` says of what they are."""
    console = Console()
    print_table(console, _COLUMNS, [(" - ".join(each.key[1:]), *_law(each)) for each in found])
    lines = [
        ("u, v", f"a block's seconds of a sample and of a micro-batch{taken}"),
        ("w, l", "a hop's, there and back; the last device's leads to the control unit"),
        ("off", "how far the law is from what was measured: root mean square"),
        ("sample", f"{tokens} tokens, {amount(cost.activation_bits / 8, 'B')}"),
        ("block", f"{amount(cost.flops, 'FLOP')} per sample; laws hold for this model only"),
        ("as it is", "control_unit, uplinks, channels and limits, which are not measured"),
    ]
    print_lines(console, lines)


def _law(each: Measured) -> tuple[str, ...]:
    law = each.law
    if law is None:
        return ("fails", *"-----")
    chunk = seconds(law.u), seconds(law.v), f"{each.compute_error:.1%}"
    return (
        *(chunk if law.u else "---"),
        *(seconds(law.w), seconds(law.ell), f"{each.hop_error:.1%}"),
    )
