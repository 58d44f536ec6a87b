"""Error of the encoder's gradient if changes of activations are sent, in each epoch.

    python benchmarks/activation_feedback.py

Trains the small Transformers of ``gradient_error.py`` on few rows, so that each row occurs often,
with and without dropout. Before every step it computes the batch's gradient g of all encoder
weights with activations rounded as for sending. They are sent whole, or as changes with
``compression.feedback``, whose memory lasts for the whole training. Prints ρ = E‖g_q − g‖² / φ² of
each epoch, a mean over its batches; φ² is the largest mean ‖g‖² of an epoch. Also prints the means
over all epochs except the first, and the share of rows whose change was sent.
``activation_feedback.json`` contains all figures.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import writable
from gradient_error import CHANCE, TASKS, UNIT, Cut, coded
from machine import machine
from ordinary import Ordinary, use_threads
from torch import Tensor

from collapipe.config import load_overrides
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder

ROWS, EPOCHS, DROPOUTS = 512, 12, (0.0, 0.1)
FEW = {"dates": f"task.train_rows={ROWS}", "topics": f"data.max_train_samples={ROWS}"}
OF_DROPOUT = {
    "dates": ("model.dropout={0}",),
    "topics": (
        "+model.config.hidden_dropout_prob={0}",
        "+model.config.attention_probs_dropout_prob={0}",
    ),
}


@dataclass
class Figures:
    """Sums over the batches of each epoch, by precision, and by whether changes were sent."""

    errors: dict[tuple[str, bool], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0] * EPOCHS)
    )
    squares: list[float] = field(default_factory=lambda: [0.0] * EPOCHS)
    changes: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0] * EPOCHS)
    )

    def ratios(self, precision: str, feedback: bool) -> list[float]:
        """ρ of each epoch."""
        return [each / max(self.squares) for each in self.errors[precision, feedback]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/activation_feedback"))
    arguments = parser.parse_args()
    use_threads(1)
    written = {}
    for task, options in TASKS.items():
        for dropout in DROPOUTS:
            one = prepared(task, options, dropout)
            figures = measured(one)
            written[f"{task}, dropout {dropout}"] = table(f"{task}, dropout {dropout}", figures)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "activation_feedback.json"
    path.write_text(json.dumps({**written, "machine": machine()}, indent=2) + "\n")


def prepared(task: str, options: tuple[str, ...], dropout: float) -> Ordinary:
    """Prepare a training whose rounds are epochs."""
    steps = f"federation.local_steps={ROWS // 64}"
    own = [each.format(dropout) for each in OF_DROPOUT[task]]
    rounds = f"federation.rounds={EPOCHS}"
    return Ordinary.prepare(load_overrides([*UNIT, *options, *own, FEW[task], steps, rounds]))


def measured(one: Ordinary) -> Figures:
    """Measure a whole training, which uses exact gradients itself."""
    figures, per_epoch = Figures(), one.settings.federation.local_steps
    coders = {each: ChangeCoder(ActivationMemory(), 1, ROWS) for each in CHANCE}
    drawn = torch.Generator().manual_seed(0)

    def before(step: int) -> None:
        if step == one.settings.federation.total_steps:
            return
        cut, epoch = Cut(one, step), step // per_epoch
        rows, counts = torch.tensor(one.rows(0, step)), cut.counts
        for precision, coder in coders.items():

            def changed(
                sent: Tensor, coder: ChangeCoder = coder, precision: str = precision
            ) -> Tensor:
                numbers, *_ = coder.encode(sent, rows, counts, precision, drawn)
                share = float((numbers >= 0).float().mean())
                figures.changes[precision][epoch] += share / per_epoch
                return torch.cat([coder.arrived.rows[row] for row in rows.tolist()])

            for feedback, code in ((False, coded(precision, drawn)), (True, changed)):
                error, _, square = cut.error("up", code, 1)
                figures.errors[precision, feedback][epoch] += error / per_epoch
        figures.squares[epoch] += square / per_epoch

    before(0)
    one.train(unions=False, each_step=lambda step, _: before(step + 1))
    return figures


def table(name: str, figures: Figures) -> dict[str, list[float]]:
    """Print ρ of whole activations and of changes, with means, and the share of rows sent as
    changes."""
    print(f"\n{name}\n{'epoch':16}" + "".join(f"{epoch + 1:>9}" for epoch in range(EPOCHS)))
    shown = dict[str, list[float]]()
    for precision in CHANCE:
        shown[f"{precision}, whole"] = figures.ratios(precision, False)
        shown[f"{precision}, changes"] = figures.ratios(precision, True)
    for kind, ratios in shown.items():
        mean = sum(ratios[1:]) / (EPOCHS - 1)
        print(f"{kind:16}" + "".join(f"{each:>9.1e}" for each in ratios) + f"{mean:>12.1e}")
    for precision, shares in figures.changes.items():
        shown[f"{precision}, sent as changes"] = shares
        print(f"{precision + ', sent':16}" + "".join(f"{each:>9.0%}" for each in shares))
    return shown


if __name__ == "__main__":
    main()
