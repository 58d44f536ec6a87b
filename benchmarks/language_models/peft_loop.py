"""A plain loop over a model of transformers with peft's adapters, for comparison.

    python -m benchmarks.language_models.peft_loop FILE THREADS OPTIONS…

It starts with the weights of the run with these options and takes the batches of its only unit.
Writes each step's loss, tokens and seconds to FILE.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from collapipe.config import Settings, load_overrides
from collapipe.data.shards import batch_rows
from collapipe.models.lora import LoraSpec
from collapipe.runs.model import initial_model
from collapipe.runs.rows import build_tokenizer, load_shards
from collapipe.seeds import derive
from collapipe.tasks.task import Examples
from collapipe.tensors import IGNORED
from collapipe.text.tokenizer import Tokenizer


def peft_loop(file: Path, threads: int, options: Sequence[str]) -> list[dict[str, float]]:
    """Run the loop in a separate process; return its steps."""
    command = [sys.executable, "-m", __name__, str(file), str(threads), *options]
    with file.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    steps: list[dict[str, float]] = json.loads(file.read_text())
    return steps


def examples_of(settings: Settings, tokenizer: Tokenizer) -> Examples:
    """The rows of the only unit."""
    (shard,) = load_shards(settings)
    return settings.task.encode(shard, tokenizer)


def with_peft(settings: Settings, tokenizer: Tokenizer) -> Any:
    """The model as transformers and peft load it, with the run's initial adapters."""
    spec: Any = settings.model
    assert isinstance(spec, LoraSpec)
    model = AutoModelForCausalLM.from_pretrained(spec.base.name, dtype=torch.float32)
    targets = list(spec.target_modules or ())
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets)
    adapted = get_peft_model(model, config)
    own = initial_model(settings, tokenizer).state_dict()
    first = {
        f"base_model.model.{spec.base.names.to_original(name)}": weight
        for name, weight in own.items()
        if ".lora_" in name
    }
    found = adapted.load_state_dict(first, strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    return adapted.to(settings.unit_device).train()


def train(settings: Settings) -> list[dict[str, float]]:
    """Train; return loss, tokens and seconds of each step."""
    tokenizer = build_tokenizer(settings)
    examples, model = examples_of(settings, tokenizer), with_peft(settings, tokenizer)
    own, total, where = settings.optimizer, settings.federation.total_steps, settings.unit_device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, betas=(own.beta1, own.beta2), eps=own.eps, weight_decay=own.weight_decay
    )
    steps, seed = [], derive(settings.seed, "data", 0)
    for step in range(total):
        start = time.perf_counter()
        batch = examples.batch(batch_rows(examples.lengths, settings.batch_size, step, seed))
        inputs, mask = batch.inputs.to(where), batch.mask.to(where)
        optimizer.param_groups[0]["lr"] = own.rate(step, total)
        logits = model(input_ids=inputs, attention_mask=mask.long()).logits
        targets = batch.targets.flatten().to(where)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED)
        loss.backward()
        if own.clip_norm is not None:
            clip_grad_norm_(weights, own.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found = loss.item()  # waits for a GPU
        tokens, seconds = int(batch.mask.sum()), time.perf_counter() - start
        steps.append({"loss": found, "tokens": tokens, "seconds": seconds})
        print(steps[-1], flush=True)
    return steps


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    Path(sys.argv[1]).write_text(json.dumps(train(load_overrides(sys.argv[3:]))))
