"""Embeddings of transformers models, and their layers as one block each.

T5's layers share one table of relative position biases, which is a weight of the first layer. The
table has a number for each bucket of distances and each attention head. The first block appends it
to the activation as further rows of each sample, and the last block removes these rows. The rows'
gradients sum over all layers on their way back, so all gradients equal the unsplit model's. The
table takes ⌈buckets · heads / d⌉ rows: one row in each of T5's published sizes.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from collapipe.errors import ConfigError
from collapipe.models.dropout import ForeignDropout


def check_length(config: Any, ids: Tensor) -> None:
    """Raise ``ConfigError`` if ``ids`` [b, s] are longer than the table of positions."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:  # T5 has no such limit
        return
    if config.model_type == "roberta":  # its first position is after the padding id
        limit -= config.pad_token_id + 1
    if ids.shape[1] > limit:
        raise ConfigError(
            f"model.name: this {config.model_type} has positions for {limit} tokens, a sample has "
            f"{ids.shape[1]}; lower task.max_length"
        )


class EncoderEmbedding(nn.Module):
    """Embedding of BERT, RoBERTa, ELECTRA (projected) and DistilBERT: [b, s] → [b, s, d]."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, ids: Tensor) -> Tensor:
        check_length(self.original.config, ids)
        with ForeignDropout():
            return self.embed(ids)

    def embed(self, ids: Tensor) -> Tensor:
        base = self.original.base_model
        hidden: Tensor = base.embeddings(ids)
        return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden


class CausalEmbedding(EncoderEmbedding):
    """Token embedding, plus positions if they are learned (GPT-2) and not rotary."""

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] to [b, s, d]; only learned positions limit the length."""
        base = self.original.base_model
        return super().forward(ids) if hasattr(base, "wpe") else base.get_input_embeddings()(ids)

    def embed(self, ids: Tensor) -> Tensor:
        base = self.original.base_model
        return base.drop(base.get_input_embeddings()(ids) + base.wpe(_places(ids)))  # type: ignore[no-any-return]


class Seq2SeqEmbedding(EncoderEmbedding):
    """The encoder of BART or Marian without its layers."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.original.get_encoder()(ids).last_hidden_state  # type: ignore[no-any-return]


class T5Embedding(EncoderEmbedding):
    """Token embedding without positions: T5 uses only relative positions."""

    def forward(self, ids: Tensor) -> Tensor:
        encoder = self.original.get_encoder()
        with ForeignDropout():
            return encoder.dropout(encoder.embed_tokens(ids))  # type: ignore[no-any-return]


class LayerBlock(nn.Module):
    """An encoder layer of an encoder-only model, BART or Marian; it attends to all tokens."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config = original, model.config

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        seen = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=mask
        )
        with ForeignDropout():
            return self.original(hidden, attention_mask=seen)  # type: ignore[no-any-return]


class CausalBlock(nn.Module):
    """A layer of GPT-2, Llama or Qwen2; a token attends to itself and earlier tokens."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config, self.index = original, model.config, index
        self.rotary = copy.deepcopy(getattr(model.base_model, "rotary_emb", None))  # no weights

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        with ForeignDropout():
            return apply_layer(self.original, self.index, self.config, self.rotary, hidden, mask)


def apply_layer(
    layer: nn.Module,
    index: int,
    config: Any,
    rotary: nn.Module | None,
    hidden: Tensor,
    mask: Tensor,
) -> Tensor:
    """Apply a causal model's layer ``index`` to ``hidden`` [b, s, d]; padding is on the right."""
    kinds = getattr(config, "layer_types", None)
    sliding = kinds is not None and kinds[index] == "sliding_attention"
    places = _places(hidden)
    seen = (create_sliding_window_causal_mask if sliding else create_causal_mask)(
        config=config,
        inputs_embeds=hidden,
        attention_mask=mask,
        past_key_values=None,
        position_ids=places,
    )
    turned = {} if rotary is None else {"position_embeddings": rotary(hidden, position_ids=places)}
    return layer(  # type: ignore[no-any-return]
        hidden, attention_mask=seen, position_ids=places, use_cache=False, **turned
    )


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


class T5Block(nn.Module):
    """A T5 encoder layer; the first one adds the position table, the last one removes it."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config = original, model.get_encoder().config
        self._first, self._last = index == 0, index == self.config.num_layers - 1

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Apply the layer; hidden is [b, s, d], or [b, s + r, d] with the table; mask [b, s]."""
        length = mask.shape[1]
        rows = self._table_as_rows(hidden) if self._first else hidden[:, length:]
        hidden = hidden[:, :length]
        seen = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=mask
        )
        with ForeignDropout():
            hidden = self.original(
                hidden, attention_mask=seen, position_bias=self._bias(rows, length)
            )[0]
        return hidden if self._last else torch.cat((hidden, rows), 1)

    def _table_as_rows(self, hidden: Tensor) -> Tensor:
        """Return the table [buckets, heads] as rows [b, r, d], padded with zeros."""
        batch, _, dim = hidden.shape
        flat = self._attention().relative_attention_bias.weight.flatten()
        return functional.pad(flat, (0, -len(flat) % dim)).view(1, -1, dim).expand(batch, -1, -1)

    def _bias(self, rows: Tensor, length: int) -> Tensor:
        """Return the position bias [1, heads, s, s] from the first sample's copy of the table."""
        config = self.config
        buckets, heads = config.relative_attention_num_buckets, config.num_heads
        table = rows[0].flatten()[: buckets * heads].view(buckets, heads)
        place = torch.arange(length, device=rows.device)
        distance = self._attention()._relative_position_bucket(
            place[None, :] - place[:, None],
            num_buckets=buckets,
            max_distance=config.relative_attention_max_distance,
        )
        return table[distance].permute(2, 0, 1).unsqueeze(0)

    def _attention(self) -> Any:
        layer: Any = self.original
        return layer.layer[0].SelfAttention
