"""A model, and a pipeline of it on daemons in separate processes."""

import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import at_least
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Part
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan
from collapipe.tensors import Batch
from collapipe.text.tokenizer import Vocabulary
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer
from tests.boxes import Boxes, boxes
from tests.device_cluster import Work
from tests.network import Place

SEED, RATE, CLIP = 0, 1e-4, 1.0
_OTHER_BOOT = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
VOCABULARY = Vocabulary(size=1000, pad=0, bos=1, eos=2)


def add_sizes(parser: ArgumentParser, dim: int = 256, blocks: int = 6, samples: int = 32) -> None:
    """Add arguments for the sizes of model and batch, with these defaults."""
    parser.add_argument("--dim", type=at_least(1), default=dim)
    parser.add_argument("--blocks", type=at_least(1), default=blocks)
    parser.add_argument("--samples", type=at_least(1), default=samples)
    parser.add_argument("--tokens", type=at_least(1), default=64)


def work(dim: int, blocks: int, samples: int, tokens: int) -> Work:
    """A model without dropout, with a decoder of one block, and a batch of random ids without
    padding."""
    torch.manual_seed(SEED)
    ids = torch.randint(3, VOCABULARY.size, (samples, tokens))
    batch = Batch(ids, torch.ones(samples, tokens, dtype=torch.bool), ids[:, : tokens // 4])
    spec = TransformerSpec(blocks, 1, dim, 4, 4 * dim, 0.0)
    return Work(spec, VOCABULARY, batch)


@dataclass
class Ours:
    """A pipeline on daemons that runs one step at a time."""

    work: Work
    segments: RemoteSegments
    embedding: Part
    head: LocalHead
    pipeline: Pipeline
    steps: int = 0

    @property
    def timer(self) -> PhaseTimer:
        """The seconds of the control unit's phases."""
        return self.pipeline.timer

    def cut(self, num_micro_batches: int) -> None:
        """Divide further batches into ``num_micro_batches``."""
        parts = self.embedding, self.segments, self.head, self.timer
        self.pipeline = Pipeline(num_micro_batches, *parts)

    @property
    def tables(self) -> list[Tensor]:
        """For each device, when each action of the last step waited, began and ended, s."""
        return self.segments.action_times

    def run(self, samples: int | None = None) -> float:
        """Run forward and backward of the batch, or of its first ``samples``; return the loss."""
        whole = self.work.batch
        rows = slice(samples)
        batch = Batch(whole.inputs[rows], whole.mask[rows], whole.targets[rows])
        return self.pipeline.run(batch, DropoutKey(SEED, 0, self.steps))

    def step(self) -> None:
        """Start the optimiser's step; return before the devices have finished it."""
        self.pipeline.step(RATE, CLIP)
        self.steps += 1

    def step_and_run(self) -> None:
        """Run an iteration from the end of a backward to the end of the next one."""
        self.step()
        self.run()


@contextmanager
def apart(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Places with different boot ids, so that processes regard them as separate machines."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number, place in enumerate(places):
            file = Path(folder, f"boot-{number}")
            file.write_text(f"{place.host}\n")
            found.append(Place(place.host, (*place.command, "sh", "-c", _OTHER_BOOT, str(file))))
        yield found


@contextmanager
def daemons(places: Sequence[Place], memory: str = "4GB") -> Iterator[Boxes]:
    """Start daemons at these places, with temporary folders."""
    with tempfile.TemporaryDirectory() as folder, boxes(Path(folder), places, memory) as started:
        yield started


@contextmanager
def ours(made: Work, plan: ClusterPlan, started: Boxes, every: int = 0) -> Iterator[Ours]:
    """Open the pipeline of a plan with mutual TLS; ``every``: steps between two replicas."""
    embedding, _, part = made.parts()
    head, timer = LocalHead(part), PhaseTimer()
    with (
        made.segments(plan, started.daemons, every, started.dialer) as segments,
        Pipeline(plan.num_micro_batches, embedding, segments, head, timer) as pipeline,
    ):
        yield Ours(made, segments, embedding, head, pipeline)
