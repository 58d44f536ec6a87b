"""Error of the encoder's gradient and of the uploaded change of weights with fewer bits.

    python benchmarks/gradient_error.py

Trains our small Transformers (dates to English, and made-up texts of a few topics; no files). At
the start, middle and end of training it computes batches' gradients g of all encoder weights
through the cut. There the rows that the head reads are encoded and decoded: the activations on the
way up, or the gradient on the way down.

For each precision it prints ρ = E‖g_q − g‖² / ‖g‖² and the squared bias ‖E g_q − g‖² / ‖g‖². The
bias is estimated without its sampling error, so it may be below 0. It also prints ρ relative to φ²,
the largest ‖g‖² of the training's stages. For a round's change of weights δ it prints ‖δ − δ_q‖² /
‖δ‖². The gain is ρ relative to φ², divided by ‖a − a_q‖² / ‖a‖² of stochastically rounded
activations a. Units measure the latter and multiply it by the gain.

The table shows the worst task and stage. It also shows the time of encoding and decoding as a share
of a batch's time in the head. ``gradient_error.json`` contains all figures.
"""

import argparse
import json
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import at_least, writable
from machine import machine
from ordinary import Ordinary, use_threads
from torch import Tensor

from collapipe.config import load_overrides
from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.part import HeadPart
from collapipe.models.sent_rows import RowsRead, scattered
from collapipe.models.split import EMBEDDING, HEAD, block_name
from collapipe.tensors import Batch
from collapipe.wire.compression.codec import decode, encode, squared_error

CHANCE = ("int8", "int6", "int4")
PRECISIONS = ("bfloat16", *CHANCE)
BERT = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
TASKS = {
    "dates": ("model.num_blocks=4", "federation.rounds=15"),
    "topics": (
        *("task=classification", "data=synthetic", "model=huggingface", "model.family=bert"),
        *(f"+model.config.{name}={size}" for name, size in BERT.items()),
        *("+model.config.num_hidden_layers=4", "optimizer.lr=1.0e-3", "federation.rounds=12"),
    ),
}
WEIGHTS = {"full": (), "LoRA": ("adapter=lora",)}
UNIT = ("federation.num_units=1",)
Code = Callable[[Tensor], Tensor]  # the received tensor for a sent one
Error = tuple[float, float, float]
Shares = dict[str, float]  # ‖a − a_q‖² / ‖a‖² by precision
Squares = dict[tuple[str, str], Error]  # by way and kind of rounding


@dataclass
class Figures:
    """Lists by kind of rounding, with an entry for each task and stage in order.

    Errors up and down are ρ, squared bias, and ρ relative to φ². Seconds are per batch.
    """

    up: dict[str, list[Error]] = field(default_factory=dict)
    down: dict[str, list[Error]] = field(default_factory=dict)
    uploads: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gains: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=writable, default=Path("outputs/gradient_error"))
    parser.add_argument("--batches", type=at_least(1), default=3, help="a stage")
    parser.add_argument("--draws", type=at_least(1), default=32, help="of each gradient")
    parser.add_argument("overrides", nargs="*", help="options of all trainings")
    arguments = parser.parse_intermixed_args()
    use_threads(1)
    figures = Figures()
    for task, options in TASKS.items():
        for weights, adapter in WEIGHTS.items():
            overrides = [*UNIT, *options, *adapter, *arguments.overrides]
            one = Ordinary.prepare(load_overrides(overrides))
            draws = arguments.draws if weights == "full" else 0
            measure(one, f"{task}, {weights}", weights, arguments.batches, draws, figures)
    arguments.output.mkdir(parents=True, exist_ok=True)
    written = {**vars(figures), "tasks": TASKS, "machine": machine()}
    path = arguments.output / "gradient_error.json"
    path.write_text(json.dumps(written, indent=2) + "\n")
    table(figures)


def measure(
    one: Ordinary, name: str, weights: str, batches: int, draws: int, figures: Figures
) -> None:
    """Train, and measure at three stages of the training."""
    federation = one.settings.federation
    steps = federation.local_steps
    begins = [0, federation.rounds // 2 * steps, federation.total_steps - steps]
    before: dict[str, Tensor] = {}
    found: list[tuple[Squares, Shares]] = []

    def stage(step: int) -> None:
        if step - steps in begins:
            keep_upload(before, trained(one), weights, figures)
        if step in begins:
            print(f"{name}, step {step} of {federation.total_steps}", flush=True)
            before.update({each: value.clone() for each, value in trained(one).items()})
            if draws:
                found.append(gradients(one, step, batches, draws, figures))

    stage(0)
    one.train(unions=False, each_step=lambda step, _: stage(step + 1))
    largest = max((whole for way, _ in found for *_, whole in way.values()), default=0.0)
    for squares, shares in found:
        for precision, share in shares.items():
            noise, *_ = squares["up", f"{precision}, chance"]
            figures.gains.setdefault(precision, []).append(noise / largest / share)
        for (way, kind), (noise, bias, whole) in squares.items():
            kept: dict[str, list[Error]] = getattr(figures, way)
            kept.setdefault(kind, []).append((noise / whole, bias / whole, noise / largest))


def trained(one: Ordinary) -> dict[str, Tensor]:
    """The encoder's trained weights."""
    named = one.model.named_parameters()
    return {
        name: weight.detach()
        for name, weight in named
        if weight.requires_grad and not name.startswith(HEAD)
    }


def keep_upload(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], weights: str, figures: Figures
) -> None:
    """Store the relative error of a round's change of weights, rounded to nearest."""
    changes = [after[name] - before[name] for name in after]
    whole = sum(float(change.square().sum()) for change in changes)
    for precision in PRECISIONS:
        lost = sum(float((c - coded(precision)(c)).square().sum()) for c in changes)
        figures.uploads.setdefault(f"{precision}, {weights}", []).append(lost / whole)


def coded(precision: str, generator: torch.Generator | None = None) -> Code:
    """A function that encodes and decodes a tensor."""

    def code(tensor: Tensor) -> Tensor:
        sent = encode(tensor, precision, generator)
        return decode(sent, tensor.shape, precision, tensor.dtype)

    return code


def gradients(
    one: Ordinary, step: int, batches: int, draws: int, figures: Figures
) -> tuple[Squares, Shares]:
    """Squared noise, squared bias and ‖g‖², summed over the unit's next batches; and the relative
    error of their activations by stochastic rounding."""
    squares: Squares = {}
    kinds: dict[str, tuple[str, torch.Generator | None, int]] = {
        **{f"{each}, nearest": (each, None, 1) for each in PRECISIONS},
        **{f"{each}, chance": (each, torch.Generator(), draws) for each in CHANCE},
    }
    cuts = [Cut(one, step + index) for index in range(batches)]
    for way in ("up", "down"):
        for kind, (precision, generator, count) in kinds.items():
            code = coded(precision, generator)
            errors = [cut.error(way, code, count) for cut in cuts]
            noise, bias, whole = (sum(each) for each in zip(*errors, strict=True))
            squares[way, kind] = noise, bias, whole
    started = time.perf_counter()
    for cut in cuts:
        cut.gradient()
    figures.seconds.setdefault("step", []).append((time.perf_counter() - started) / batches)
    sent = cuts[0].sent
    for kind, (precision, generator, _) in kinds.items():
        started = time.perf_counter()
        for _ in range(20):
            coded(precision, generator)(sent)
        spent = (time.perf_counter() - started) / 20
        figures.seconds.setdefault(kind, []).append(spent)
    activations = [cut.sent for cut in cuts]
    whole = sum(float(each.double().square().sum()) for each in activations)
    lost = {q: sum(squared_error(a, q, by_chance=True) for a in activations) for q in CHANCE}
    return squares, {precision: each / whole for precision, each in lost.items()}


class Cut:
    """Forward of a batch, and gradients through the cut, with the same dropout in each draw."""

    def __init__(self, one: Ordinary, step: int) -> None:
        self._one, self._key = one, DropoutKey(one.settings.seed, 0, step)
        self._batch: Batch = one.examples.batch(one.rows(0, step))
        self._head = HeadPart(HEAD, one.model.train().head, one.settings.optimizer)
        rows = RowsRead.by(one.settings.model)
        self._read = rows.of(self._batch.mask, self._batch.targets)
        self._weights = [w for n, w in one.model.named_parameters() if not n.startswith(HEAD)]
        self._hidden = self._forward()
        self._exact = self.gradient()

    @property
    def sent(self) -> Tensor:
        """The activation's rows that are sent."""
        return self._hidden.detach()[self._read]

    @property
    def counts(self) -> Tensor:
        """The number of sent rows of each sample."""
        return self._read.sum(1)

    def _forward(self) -> Tensor:
        model = self._one.model
        with drawing_from(self._key.generator(EMBEDDING, 0)):
            hidden: Tensor = model.embedding(self._batch.inputs)
        for index, block in enumerate(model.blocks):
            with drawing_from(self._key.generator(block_name(index), 0)):
                hidden = block(hidden, self._batch.mask)
        return hidden

    def gradient(self, **codes: Code) -> Tensor:
        """The gradient of all encoder weights as a float64 vector; ``codes`` are by direction."""
        batch, same = self._batch, lambda tensor: tensor
        arrived = scattered(codes.get("up", same)(self.sent), self._read)
        generator = self._key.generator(HEAD, 0)
        _, answer = self._head.answer(
            arrived, batch.mask, batch.targets, batch.num_targets, generator
        )
        self._head.forget_gradients()
        back = scattered(codes.get("down", same)(answer[self._read]), self._read)
        found = torch.autograd.grad(
            self._hidden, self._weights, back, retain_graph=True, allow_unused=True
        )
        return torch.cat([each.flatten().double() for each in found if each is not None])

    def error(self, way: str, code: Code, draws: int) -> Error:
        """Mean of ‖g_q − g‖², estimate of ‖E g_q − g‖² without its sampling error, and ‖g‖²."""
        total, noise = torch.zeros_like(self._exact), 0.0
        for _ in range(draws):
            off = self.gradient(**{way: code}) - self._exact
            total += off
            noise += float(off.square().sum()) / draws
        bias = float((total / draws).square().sum())
        if draws > 1:
            bias = (draws * bias - noise) / (draws - 1)
        return noise, bias, float(self._exact.square().sum())


def table(figures: Figures) -> None:
    columns = "ρ", "bias²", "ρ by φ²"
    print(f"{'':20}" + "".join(f"{f'{c}, {way}':>16}" for way in ("up", "down") for c in columns))
    for kind, errors in figures.up.items():
        worst = [
            max(each) for way in (errors, figures.down[kind]) for each in zip(*way, strict=True)
        ]
        numbers = "".join(f"{each:>16.1e}" for each in worst)
        shares = map(operator.truediv, figures.seconds[kind], figures.seconds["step"])
        print(f"{kind:20}{numbers}  {max(shares):.1%} of a batch's time")
    for precision, gains in figures.gains.items():
        print(f"gain, {precision:14} {min(gains):>10.2f} ... {max(gains):.2f}")
    for name, lost in figures.uploads.items():
        print(f"upload, {name:20} {max(lost):>10.1e}")


if __name__ == "__main__":
    main()
