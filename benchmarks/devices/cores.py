"""Target tokens per second on this machine: two daemons with a core each, against one process.

The other sides are the same segments in one thread, and an ordinary loop with two threads.
"""

import os
import statistics
from argparse import ArgumentParser, Namespace

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.arguments import at_least
from benchmarks.devices.cluster import CLIP, RATE, SEED, add_sizes, daemons, ours, work
from benchmarks.devices.sides import Side, about, ratio, save, turns
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Optimizer
from collapipe.models.split import SplitModel, build_empty
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline
from tests.device_cluster import Work, device_name, even_plan, plan_of
from tests.network import Place


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for widths, micro-batches and sizes."""
    parser.add_argument("--dims", type=at_least(1), nargs="+", default=[256, 768])
    parser.add_argument("--micro-batches", type=at_least(1), nargs="+", default=[4, 8, 16])
    add_sizes(parser)


def main(arguments: Namespace) -> None:
    print(f"{'width':>6}{'m':>4}  tokens/s: daemons, inline, loop; daemons/inline; daemons/loop")
    cases = [(dim, m) for dim in arguments.dims for m in arguments.micro_batches]
    rows = [_row(arguments, dim, m) for dim, m in cases]
    save(arguments.output, "cores", {"about": about(arguments), "rows": rows})


def _row(arguments: Namespace, dim: int, m: int) -> dict[str, object]:
    made = work(dim, arguments.blocks, arguments.samples, arguments.tokens)
    names = [device_name(k) for k in range(2)]
    plan = even_plan(names, arguments.blocks, plan_of(names[:1], (1,), m))
    embedding, blocks, part = made.parts()
    head = LocalHead(part)
    with (
        daemons([Place()] * 2) as started,
        ours(made, plan, started) as mine,
        inline_pipeline(plan, embedding, blocks, head) as inline,
    ):

        def inline_iterate() -> None:
            torch.set_num_threads(1)
            inline.run(made.batch, DropoutKey(SEED, 0, 0))
            inline.step(RATE, CLIP)

        def iterate() -> None:
            torch.set_num_threads(1)
            mine.step_and_run()

        mine.run()
        sides = {"daemons": iterate, "inline": inline_iterate, "loop": _loop(made)}
        seconds, _ = turns(sides, arguments.turns, {})
    tokens = made.batch.num_targets
    speeds = ", ".join(f"{tokens / statistics.median(each):,.0f}" for each in seconds.values())
    against = (ratio(seconds[name], seconds["daemons"]) for name in ("inline", "loop"))
    print(f"{dim:>6}{m:>4}  {speeds}; {'; '.join(against)}", flush=True)
    return {"dim": dim, "micro_batches": m, "target_tokens": tokens, "seconds": seconds}


def _loop(made: Work) -> Side:
    """An iteration of one model and one optimiser on the whole batch."""
    weights = {name: each.clone() for name, each in made.start.items()}
    model = build_empty(lambda: SplitModel(made.spec, made.vocabulary), weights).train()
    optimizer = Optimizer(made.optimizer, model)

    def iterate() -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        loss = model.loss(made.batch, DropoutKey(SEED, 0, 0)) / made.batch.num_targets
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step(RATE)

    return iterate
