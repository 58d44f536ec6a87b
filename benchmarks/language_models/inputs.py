"""A model with random weights, and made-up rows, without a network or foreign texts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from collapipe.tasks.dates import draw

VOCABULARY = 151_936
HALF_BILLION = {  # sizes of Qwen2.5-0.5B
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
ONE_AND_A_HALF_BILLION = {  # sizes of Qwen2.5-1.5B
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
HUB_ID, _REVISION = "made/half-billion", "0" * 40
_END, _PROMPT = "<|endoftext|>", "Translate this date to English:"


def random_model(cache: Path, sizes: Mapping[str, int]) -> Path:
    """Save a Qwen2 with random bfloat16 weights in a hub cache as ``HUB_ID``; return its folder.
    Its tokeniser reads numbers; transformers' class of this family makes each digit a token."""
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    folder, head = repository / "snapshots" / _REVISION, repository / "refs/main"
    head.parent.mkdir(parents=True)
    head.write_text(_REVISION)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **ends)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    ids = {_END: 0, **{str(number): number for number in range(1, VOCABULARY)}}
    words = tokenizers.Tokenizer(WordLevel(ids, unk_token=_END))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=_END).save_pretrained(folder)
    return folder


def numbers(file: Path, rows: int, tokens: int) -> Path:
    """Write texts with at least ``tokens`` tokens each for ``random_model``."""
    drawn = np.random.default_rng(0).integers(1, VOCABULARY, (rows, tokens)).tolist()
    return _written(file, [{"text": " ".join(map(str, row))} for row in drawn])


def conversations(file: Path, count: int, task: str, seed: int = 0) -> Path:
    """Write questions about dates with answers, as messages, or as plain texts for
    ``causal_lm``."""
    rows = []
    for row in draw(count, seed):
        question, answer = f"{_PROMPT} {row['source']}", row["target"]
        roles = {"user": question, "assistant": answer}
        messages = [{"role": role, "content": text} for role, text in roles.items()]
        text = {"text": f"{question}\n{answer}"}
        rows.append(text if task == "causal_lm" else {"messages": messages})
    return _written(file, rows)


def _written(file: Path, rows: Sequence[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
