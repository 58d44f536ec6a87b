"""A folder with a small causal model and its tokeniser, and a LoRA run that starts from it."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from federated import grid_of, train
from tokenizers import ByteLevelBPETokenizer

from collapipe import config
from collapipe.config import Settings

_SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "num_local_experts": 4,  # for Mixtral
}
_RUN = (
    "task=causal_lm",
    "data=synthetic",
    "data.max_train_samples=12",
    "data.max_eval_samples=4",
    "task.max_length=16",
    "batch_size=4",
    "model=huggingface",
    "model.pretrained=true",
    "adapter=lora",
    "adapter.rank=2",
    "optimizer.lr=1.0e-2",
    "optimizer.warmup_steps=0",
    "pipeline.num_micro_batches=2",
    "decoder.mode=control_unit",
    "federation.num_units=2",
    "federation.rounds=2",
    "federation.local_steps=1",
    "federation.eval_every=2",
)


def causal_folder(path: Path, seed: int = 0, family: str = "llama") -> Path:
    """Save a model with random weights in float32, and its tokeniser."""
    made = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    made.train_from_iterator(["the small garden"], 260, special_tokens=special)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = transformers.CONFIG_MAPPING[family](vocab_size=len(tokenizer), **_SIZE)
        transformers.AutoModelForCausalLM.from_config(own).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def lora_run(run_dir: Path, folder: Path, *overrides: str, resume: str | None = None) -> Settings:
    """Train a run in ``run_dir``, and return its settings."""
    settings = lora_settings(run_dir, folder, overrides)
    train(grid_of(settings), settings, resume)
    return settings


def lora_settings(run_dir: Path, folder: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of such a run."""
    return config.load_overrides(
        [*_RUN, f"model.name={folder}", *overrides, f"hydra.run.dir={run_dir}"]
    )
