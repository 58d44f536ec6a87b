"""The encoder–decoder Transformer of Vaswani et al. 2017 with pre- or post-norm.

Dropout applies to embeddings and to each sublayer's output (section 5.4), not to attention weights,
so attention is one fused kernel.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe.errors import ConfigError
from collapipe.models.copying import copied
from collapipe.models.dropout import Dropout
from collapipe.models.output_layer import OutputLayer
from collapipe.models.split import decode_greedily, shift_right
from collapipe.sections import Count, Share
from collapipe.tensors import IGNORED
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import check_fields

KeysValues = tuple[Tensor, Tensor]  # each [b, heads, length, d / heads]


@dataclass(frozen=True)
class TransformerSpec:
    """Sizes of the model: the options ``model.*``."""

    num_blocks: Count = 6
    num_decoder_blocks: Count = 6
    dim: Count = 512
    num_heads: Count = 8
    feed_forward_dim: Count = 2048
    dropout: Share = 0.1
    norm: Literal["pre", "post"] = "pre"
    tie_embeddings: bool = True
    head: ClassVar[str] = "decoder"
    own_tokenizer: ClassVar[None] = None  # the first weights are drawn

    def __post_init__(self) -> None:
        check_fields("model", self)
        if self.dim % self.num_heads or self.dim % 2:
            raise ConfigError(
                f"model.dim={self.dim}: must be even and a multiple of model.num_heads="
                f"{self.num_heads}"
            )

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return Embedding(self, vocabulary)

    def build_block(self, index: int) -> nn.Module:
        if torch.get_default_device().type == "meta":
            return copied(_empty_block(self))
        return EncoderBlock(self)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        return Decoder(self, vocabulary)


@functools.lru_cache(maxsize=8)  # each unit and round copies it
def _empty_block(spec: TransformerSpec) -> nn.Module:
    """Return a block without values; call it on torch's device ``meta``."""
    return EncoderBlock(spec)


def positions(start: int, length: int, dim: int, like: Tensor) -> Tensor:
    """Return sinusoidal positions [length, dim] starting at ``start`` (section 3.5)."""
    place = torch.arange(start, start + length, dtype=torch.float64).unsqueeze(1)
    rate = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(1e4) / dim))
    table = torch.stack((torch.sin(place * rate), torch.cos(place * rate)), dim=-1)
    return table.flatten(1).to(like.dtype).to(like.device)  # mps has no float64


class Embedding(nn.Module):
    """Token embedding times √d, plus positions, then dropout."""

    def __init__(self, spec: TransformerSpec, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary.size, spec.dim)
        # This scale fits both the input's factor √d and an output layer that shares the weights.
        nn.init.normal_(self.tokens.weight, std=spec.dim**-0.5)
        self.dropout = Dropout(spec.dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Map ids [b, s] to [b, s, d]; ``start`` is the first id's position."""
        dim = self.tokens.embedding_dim
        hidden: Tensor = self.tokens(ids) * math.sqrt(dim)
        hidden = hidden + positions(start, ids.shape[1], dim, hidden)
        return self.dropout(hidden)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head attention with reusable keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (_linear(dim, dim) for _ in range(4))

    def keys_values(self, source: Tensor) -> KeysValues:
        """Return keys and values of ``source`` [b, s, d]."""
        return self._heads(self.key(source)), self._heads(self.value(source))

    def forward(
        self, x: Tensor, keys_values: KeysValues, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Let x [b, t, d] attend where ``mask`` (bool, broadcast to [b, heads, t, s]) is True."""
        query = self._heads(self.query(x))
        keys, values = keys_values
        mixed = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class Sublayer(nn.Module):
    """Residual connection, pre- or post-norm, and dropout of a sublayer."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.dim)
        self.dropout = Dropout(spec.dropout)
        self.pre = spec.norm == "pre"

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the sublayer's ``output`` to x."""
        total = x + self.dropout(output)
        return total if self.pre else self.norm(total)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with ReLU and a residual connection."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.around = Sublayer(spec)
        self.inner = _linear(spec.dim, spec.feed_forward_dim)
        self.outer = _linear(spec.feed_forward_dim, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.around.after(x, self.outer(functional.relu(self.inner(self.around.before(x)))))


class EncoderBlock(nn.Module):
    """One Transformer encoder block (TEB): self-attention and feed-forward."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.around_attention = Sublayer(spec)
        self.attention = Attention(spec.dim, spec.num_heads)
        self.feed_forward = FeedForward(spec)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Map hidden [b, s, d] and mask [b, s], True at tokens, to hidden [b, s, d]."""
        seen = self.around_attention.before(hidden)
        keys_values = self.attention.keys_values(seen)
        mixed = self.attention(seen, keys_values, mask[:, None, None, :])
        return self.feed_forward(self.around_attention.after(hidden, mixed))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention to the encoder, and feed-forward."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.around_self = Sublayer(spec)
        self.self_attention = Attention(spec.dim, spec.num_heads)
        self.around_cross = Sublayer(spec)
        self.cross_attention = Attention(spec.dim, spec.num_heads)
        self.feed_forward = FeedForward(spec)

    def forward(
        self, x: Tensor, memory: KeysValues, memory_mask: Tensor, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Return hidden states of the shape of x [b, t, d], and keys and values for ``past``.

        Without ``past``, x is the whole sequence and attends causally. With ``past``, x is the next
        position alone and attends to all earlier ones.
        """
        seen = self.around_self.before(x)
        keys, values = self.self_attention.keys_values(seen)
        if past is not None:
            keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)
        mixed = self.self_attention(seen, (keys, values), None, causal=past is None)
        x = self.around_self.after(x, mixed)
        crossed = self.cross_attention(self.around_cross.before(x), memory, memory_mask)
        return self.feed_forward(self.around_cross.after(x, crossed)), (keys, values)


class Decoder(nn.Module):
    """The decoder and output layer, which follow the encoder's last block; implements ``Head``."""

    def __init__(self, spec: TransformerSpec, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        norm = nn.LayerNorm if spec.norm == "pre" else nn.Identity
        self.memory_norm = norm(spec.dim)
        self.embedding = Embedding(spec, vocabulary)
        self.blocks = nn.ModuleList(DecoderBlock(spec) for _ in range(spec.num_decoder_blocks))
        self.norm = norm(spec.dim)
        self.output = None if spec.tie_embeddings else _linear(spec.dim, vocabulary.size)

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        inputs = shift_right(targets, self.vocabulary.bos, self.vocabulary.pad)
        x, _ = self._step(inputs, 0, self._memories(hidden), mask, None)
        real = targets != IGNORED  # skip padding: the output layer is the most expensive
        return self._output().loss(x[real], targets[real])

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        memories, past, output = self._memories(hidden), None, self._output()

        def logits(ids: Tensor, position: int) -> Tensor:
            nonlocal past
            x, past = self._step(ids, position, memories, mask, past)
            return functional.linear(x[:, -1], output.weight, output.bias)

        return decode_greedily(logits, mask, self.vocabulary.bos, self.vocabulary.eos, max_length)

    def _memories(self, hidden: Tensor) -> list[KeysValues]:
        memory = self.memory_norm(hidden)
        blocks = cast(Iterable[DecoderBlock], self.blocks)
        return [block.cross_attention.keys_values(memory) for block in blocks]

    def _step(
        self,
        ids: Tensor,
        start: int,
        memories: list[KeysValues],
        mask: Tensor,
        past: list[KeysValues] | None,
    ) -> tuple[Tensor, list[KeysValues]]:
        x, present = self.embedding(ids, start), []
        for block, memory, earlier in zip(
            self.blocks, memories, past or repeat(None), strict=False
        ):
            x, kept = block(x, memory, mask[:, None, None, :], earlier)
            present.append(kept)
        return self.norm(x), present

    def _output(self) -> OutputLayer:
        if self.output is None:
            return OutputLayer(self.embedding.tokens.weight, None)
        return OutputLayer(self.output.weight, self.output.bias)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
