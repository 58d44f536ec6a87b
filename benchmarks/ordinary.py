"""An ordinary PyTorch loop: one process, one model, one optimiser, no federation.

Benchmarks compare CollaPipe with this loop. Each of its steps takes the union of the units' batches
of that step. So it trains on the same samples in the same order.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from datasets import concatenate_datasets
from torch.nn.utils import clip_grad_norm_

from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Optimizer
from collapipe.models.split import SplitModel
from collapipe.runs.model import initial_model
from collapipe.runs.rows import build_tokenizer, load_shards
from collapipe.seeds import derive
from collapipe.tasks.task import Examples
from collapipe.tensors import Batch
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ordinary:
    """A model, its training rows and settings."""

    settings: Settings
    tokenizer: Tokenizer
    model: SplitModel
    examples: Examples
    shards: list[range]  # each unit's rows among ``examples``

    @classmethod
    def prepare(cls, settings: Settings) -> "Ordinary":
        """Prepare the tokeniser, rows and initial weights of a run of ``settings``."""
        tokenizer = build_tokenizer(settings)
        rows = load_shards(settings)
        shards, first = [], 0
        for shard in rows:
            shards.append(range(first, first + len(shard)))
            first += len(shard)
        examples = settings.task.encode(concatenate_datasets(rows), tokenizer)
        return cls(settings, tokenizer, initial_model(settings, tokenizer), examples, shards)

    def batches(self, unions: bool) -> Iterator[tuple[int, list[Batch]]]:
        """Yield each global step with its batches: one union, or a batch per unit."""
        settings = self.settings
        for step in range(settings.federation.total_steps):
            rows = [
                [shard[row] for row in self.rows(unit, step)]
                for unit, shard in enumerate(self.shards)
            ]
            if unions:
                rows = [[row for unit in rows for row in unit]]
            yield step, [self.examples.batch(each) for each in rows]

    def train(
        self,
        unions: bool,
        each_step: Callable[[int, float], None] = lambda step, loss: None,
        each_batch: Callable[[int, float], None] = lambda tokens, seconds: None,
    ) -> None:
        """Train. Call ``each_step`` with step and loss, and ``each_batch`` with tokens and
        seconds."""
        settings = self.settings
        optimizer = Optimizer(settings.optimizer, self.model)
        for step, batches in self.batches(unions):
            self.model.train()
            for batch in batches:
                start = time.perf_counter()
                key = DropoutKey(settings.seed, 0, step)
                loss = self.model.loss(batch, key) / batch.num_targets
                loss.backward()
                if settings.optimizer.clip_norm is not None:
                    clip_grad_norm_(self.model.parameters(), settings.optimizer.clip_norm)
                optimizer.step(settings.optimizer.rate(step, settings.federation.total_steps))
                each_batch(batch.num_targets, time.perf_counter() - start)
            each_step(step, float(loss.detach()))

    def rows(self, unit: int, step: int) -> list[int]:
        """The rows of a unit's batch in a global step, as indices into its shard."""
        settings = self.settings
        seed = derive(settings.seed, "data", unit)
        shard = self.shards[unit]
        lengths = self.examples.lengths[shard.start : shard.stop]
        rows = batch_rows(lengths, settings.batch_size, step, seed)
        return [int(row) for row in rows]


def use_threads(count: int) -> None:
    """Set torch's threads."""
    torch.set_num_threads(count)
