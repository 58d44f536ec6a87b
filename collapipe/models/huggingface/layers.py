"""Embeddings of transformers models, and their layers as one block each.

T5's layers share one table of relative position biases, which is a weight of the first layer. The
table has a number for each bucket of distances and each attention head. The first block appends it
to the activation as further rows of each sample, and the last block removes these rows. The rows'
gradients sum over all layers on their way back, so all gradients equal the unsplit model's. The
table takes ⌈buckets · heads / d⌉ rows: one row in each of T5's published sizes.
"""

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from collapipe.errors import ConfigError
from collapipe.models.dropout import ForeignDropout

LIKE_ROBERTA = "roberta", "xlm-roberta", "camembert"  # the first position is after the padding id
_ENDS = (  # names of a decoder-only model's embedding and last norm
    *("embed_tokens", "embed_in", "embeddings", "embedding_norm", "norm"),
    *("final_norm", "final_layernorm", "final_layer_norm"),
)


class Absent(nn.Module):
    """Placeholder for a module of another machine. As a layer it passes its input on, and has the
    plain attributes that a model's forward may read of a layer."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if name[0] != "_" and not isinstance(value, Tensor):
                setattr(self, name, value)

    def forward(self, *args: Any, inputs_embeds: Any = None, **_: Any) -> Any:
        """Return the activation as it is."""
        return args[0] if args else inputs_embeds

    def __deepcopy__(self, memo: object) -> "Absent":
        return self  # it has no state


@functools.lru_cache(maxsize=8)  # shared by a model's L blocks, which would have L² of them
def absent(layers: nn.ModuleList) -> tuple[Absent, ...]:
    """Return a placeholder for each of a model's ``layers``."""
    return tuple(map(Absent, layers))


def most_tokens(config: Any) -> float:
    """Return the number of positions in an encoder's table; infinite for T5, which has none."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return math.inf
    if config.model_type in LIKE_ROBERTA:
        limit -= config.pad_token_id + 1
    return float(limit)


def fault_of_length(config: Any, tokens: int) -> str | None:
    """Return a message if the model has fewer positions than ``tokens``."""
    if tokens > (limit := most_tokens(config)):
        return f"this {config.model_type} has positions for {limit:g} tokens"
    return None


def check_length(config: Any, ids: Tensor) -> None:
    """Raise ``ConfigError`` if ``ids`` [b, s] are longer than the table of positions."""
    if fault := fault_of_length(config, tokens := ids.shape[1]):
        raise ConfigError(f"model.name: {fault}, a sample has {tokens}; lower task.max_length")


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


class GPT2Embedding(EncoderEmbedding):
    """Token embedding plus learned positions."""

    def embed(self, ids: Tensor) -> Tensor:
        base = self.original.base_model
        return base.drop(base.wte(ids) + base.wpe(_places(ids)))  # type: ignore[no-any-return]


class Seq2SeqEmbedding(EncoderEmbedding):
    """The encoder of BART or Marian without its layers."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.original.get_encoder()(ids).last_hidden_state  # type: ignore[no-any-return]


class T5Embedding(EncoderEmbedding):
    """Token embedding without positions: T5 uses only relative positions."""

    def embed(self, ids: Tensor) -> Tensor:
        encoder = self.original.get_encoder()
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


class GPT2Block(LayerBlock):
    """A layer of GPT-2; a token attends to itself and earlier tokens."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        with ForeignDropout():
            return apply_layer(self.original, self.config, hidden, mask)


def apply_layer(layer: nn.Module, config: Any, hidden: Tensor, mask: Tensor) -> Tensor:
    """Apply a layer of GPT-2 to ``hidden`` [b, s, d]; padding is on the right."""
    seen = create_causal_mask(
        config=config,
        inputs_embeds=hidden,
        attention_mask=mask,
        past_key_values=None,
        position_ids=_places(hidden),
    )
    return layer(hidden, attention_mask=seen, use_cache=False)  # type: ignore[no-any-return]


class DecoderEmbedding(nn.Module):
    """The token embedding of a decoder-only model, scaled as its forward does."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original
        self._around = around(original.base_model, (), first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] to [b, s, d]."""
        hidden = self.original.base_model.get_input_embeddings()(ids)
        with ForeignDropout():
            return self._around(inputs_embeds=hidden, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """A layer of a decoder-only model or ModernBERT, within the model's own forward.

    The forward makes the masks and positions, so no family needs a class of its own.
    """

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original = original
        own: list[nn.Module] = [*absent(model.base_model.layers)]
        own[index] = original
        self.around = around(model.base_model, own)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        with ForeignDropout():
            out = self.around(inputs_embeds=hidden, **seeing(mask), use_cache=False)
        return out.last_hidden_state  # type: ignore[no-any-return]


def around(base: Any, layers: Iterable[nn.Module], first: bool = False) -> Any:
    """Return a decoder-only model with these ``layers`` alone, without embedding and last norm.

    The layers are not registered as its submodules, so their weights have one name. If it is not
    the ``first`` part, it takes its input as it is.
    """
    found = copy.copy(base)
    for name, value in vars(base).items():  # else parts would share what is registered
        if isinstance(value, dict | set):
            vars(found)[name] = copy.copy(value)
    vars(found)["_modules"] = {
        name: Absent(each) if name in _ENDS else copy.deepcopy(each)
        for name, each in base._modules.items()
        if name != "layers"
    }
    vars(found)["layers"] = [*layers]
    if not first:
        take_input_as_is(found)
    return found


def take_input_as_is(base: Any) -> None:
    """Let a part of a decoder-only model neither scale nor drop its input: the first part has done
    so."""
    base.config = copy.copy(base.config)
    changes = (base, "embedding_multiplier", 1.0), (base, "embedding_dropout", 0.0)
    drops = ((base, name, nn.Identity()) for name in ("embed_dropout", "emb_dropout"))
    for owner, name, neutral in (*changes, *drops, (base.config, "mup_enabled", False)):
        if hasattr(owner, name):
            setattr(owner, name, neutral)


def seeing(mask: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a decoder-only model's forward by which a token sees the earlier ones
    of its sequence; ``mask`` is a batch's.

    Positions begin anew with each sequence of a row, and padding is one more. From positions
    without a mask, the forward derives which tokens see each other.
    """
    if mask.dtype == torch.bool:
        return {"attention_mask": mask}
    place = torch.arange(mask.shape[1], device=mask.device)
    begins = torch.ones_like(mask, dtype=torch.bool)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    return {"position_ids": place - (place * begins).cummax(1).values}


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
