"""The same model on torch.distributed.pipelining, over gloo without encryption.

Benchmarks compare CollaPipe with it. Tests compare its gradients, because it shares no code with
our runtime.
"""

import math
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from collapipe.models.part import Part, clip_scale
from collapipe.tensors import Tensors
from tests.device_cluster import Work

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}


@dataclass(frozen=True)
class Rival:
    """Processes that hold a segment each, the first also the embedding, the last also the head.

    The model has no dropout, and each micro-batch has the same number of samples.
    """

    pids: Sequence[int]
    _ends: Sequence["Connection[Any, Any]"]

    def run(self) -> tuple[float, Tensors]:
        """Run the work's batch forward and backward; return the loss and all gradients."""
        answers = self._ask(("run",))
        gradients = {name: each for _, found in answers for name, each in found.items()}
        return answers[-1][0], gradients

    def iterate(self, rate: float, clip_norm: float) -> float:
        """Run the batch and a step clipped by the norm of all gradients; return the loss."""
        return float(self._ask(("iterate", rate, clip_norm))[-1])

    def _ask(self, command: tuple[Any, ...]) -> list[Any]:
        for end in self._ends:
            end.send(command)
        return [end.recv() for end in self._ends]


@contextmanager
def rival(work: Work, cut: Sequence[int], num_micro_batches: int, schedule: str) -> Iterator[Rival]:
    """Start a process for each number in ``cut``, which is its number of consecutive blocks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in cut]
        processes = [
            context.Process(
                target=_serve,
                args=(end, work, cut, rank, num_micro_batches, schedule, Path(folder) / "store"),
                daemon=True,
            )
            for rank, (_, end) in enumerate(pairs)
        ]
        for process, (_, end) in zip(processes, pairs, strict=True):
            process.start()
            end.close()  # so that ``recv`` fails if the process ends
        try:
            yield Rival([each.pid or 0 for each in processes], [own for own, _ in pairs])
        finally:
            for process in processes:
                process.kill()
                process.join()


class _Stage(nn.Module):
    """Part of the model: (ids or activation, mask, targets) → activation, or loss."""

    def __init__(self, parts: Sequence[Part], head: nn.Module | None, tokens: int) -> None:
        super().__init__()
        self.chain = nn.ModuleList(part.module for part in parts)
        self.first = parts[0].name == "embedding"
        self.head, self.tokens = head, tokens

    def forward(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        blocks = list(self.chain)
        if self.first:
            hidden = blocks.pop(0)(hidden)
        for block in blocks:
            hidden = block(hidden, mask)
        if self.head is None:
            return hidden
        loss: Tensor = self.head.loss(hidden, mask, targets)  # type: ignore[operator]
        return (loss / self.tokens).reshape(1)


def _serve(
    end: "Connection[Any, Any]",
    work: Work,
    cut: Sequence[int],
    rank: int,
    count: int,
    schedule: str,
    store: Path,
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(cut)
    )
    embedding, blocks, head = work.parts()
    parts = blocks[sum(cut[:rank]) : sum(cut[: rank + 1])]
    last = rank == len(cut) - 1
    parts = [embedding, *parts] if rank == 0 else parts
    batch, own = work.batch, [*parts, head] if last else parts
    module = _Stage(parts, head.module if last else None, batch.num_targets)
    ids = batch.inputs[: batch.num_samples // count].to("meta")
    hidden = torch.empty(*ids.shape, work.spec.dim, device="meta", requires_grad=True)
    stage = PipelineStage(
        *(module, rank, len(cut), torch.device("cpu")),
        input_args=(ids if rank == 0 else hidden,),
        output_args=(torch.empty(1, device="meta", requires_grad=True) if last else hidden,),
    )
    runs = SCHEDULES[schedule](
        stage, count, loss_fn=lambda output, _: output.sum(), scale_grads=False
    )

    def run() -> float:
        losses = list[Tensor]()
        given = (batch.inputs,) if rank == 0 else ()
        known = {"mask": batch.mask, "targets": batch.targets}
        target = torch.zeros(batch.num_samples) if last else None
        runs.step(*given, target=target, losses=losses, return_outputs=False, **known)
        return sum(float(loss.detach()) for loss in losses)

    while True:
        command, *numbers = end.recv()
        loss = run()
        if command == "run":
            end.send((loss, _gradients(own)))
        else:
            _step(own, *numbers)
            end.send(loss)


def _gradients(parts: Sequence[Part]) -> Tensors:
    return {
        f"{part.name}.{name}": weight.grad.clone()
        for part in parts
        for name, weight in part.module.named_parameters()
        if weight.grad is not None
    }


def _step(parts: Sequence[Part], rate: float, clip_norm: float) -> None:
    squared = torch.tensor(math.fsum(part.squared_norm() for part in parts), dtype=torch.float64)
    distributed.all_reduce(squared)
    scale = clip_scale([float(squared)], clip_norm)
    for part in parts:
        part.step(rate, scale)
