"""A model with weights and almost no computation, for benchmarks/overhead.py."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class EmptySpec:
    """One block of ``payload_bytes``; embedding and head have one number each."""

    payload_bytes: int
    num_blocks: int = 1
    dim: int = 1
    head: str = "decoder"
    own_tokenizer: None = None

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return Scale(1)

    def build_block(self, index: int) -> nn.Module:
        return Scale(self.payload_bytes // 4)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        return EmptyHead()


class Scale(nn.Module):
    """Multiplies its input by the first of its numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(numbers))

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.unsqueeze(-1).float()
        return x * self.numbers[0]


class EmptyHead(nn.Module):
    """A head whose loss is the mean of its input; its predictions are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones(1))

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return hidden.mean() * self.number[0]

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return [[] for _ in hidden]
