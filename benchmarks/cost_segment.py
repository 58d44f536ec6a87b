"""The models of benchmarks/cost.py, and a segment of a model as a device holds it."""

import functools

import torch
from torch import Tensor

from collapipe import config
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.part import Part
from collapipe.models.split import block_name
from pipeline.segment import Segment

TOKENS = 64
ADAMW = config.load_overrides([]).optimizer
_KEY = DropoutKey(seed=0, unit=0, step=0)
_BERT = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_GPT2 = {"n_embd": 384, "n_head": 6}
_T5 = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8}
MODELS = {
    "bert": functools.partial(HuggingFaceSpec, family="bert", config=_BERT),
    "gpt2": functools.partial(HuggingFaceSpec, family="gpt2", num_blocks=6, config=_GPT2),
    "t5": functools.partial(HuggingFaceSpec, family="t5", config=_T5),
}


class Worked:
    """The first ``blocks`` blocks of a model, with random weights, as on a middle device."""

    def __init__(self, name: str, blocks: int) -> None:
        self.spec = MODELS[name]()
        self.parts = [
            Part(block_name(index), self.spec.build_block(index), ADAMW) for index in range(blocks)
        ]
        self.segment = Segment(self.parts)

    def forward(self, micro_batch: int, samples: int, tokens: int = TOKENS) -> torch.Size:
        """Compute on a random input; the shape of the activation."""
        hidden = torch.randn(samples, tokens, self.spec.dim)
        mask = torch.ones(samples, tokens, dtype=torch.bool)
        return self.segment.forward(micro_batch, hidden, _KEY, mask).shape

    def backward(self, micro_batch: int, gradient: Tensor) -> None:
        """Run the backward of a micro-batch for the received ``gradient``."""
        self.segment.backward(micro_batch, gradient)

    def step(self) -> None:
        """Take a step of AdamW on each block."""
        for part in self.parts:
            part.step(1e-4, 1.0)
