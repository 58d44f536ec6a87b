"""Heads, the parts after the blocks: a task head, a causal model's last layers, or a decoder."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from collapipe.errors import ConfigError
from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.layers import (
    Absent,
    apply_layer,
    check_length,
    most_tokens,
    seeing,
    take_input_as_is,
)
from collapipe.models.output_layer import OutputLayer
from collapipe.models.split import decode_greedily, shift_right
from collapipe.tensors import IGNORED


@dataclass
class _Output(BaseModelOutputWithPoolingAndCrossAttentions):  # type: ignore[misc]
    """What the forward of any model with a head may read of its base model's output."""

    router_logits: None = None


class Encoded(nn.Module):
    """Placeholder for an encoder that another machine has run: it returns its input."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *none: None, inputs_embeds: Tensor, **named: Any) -> Any:
        """Return the encoder's output, given its last layer's activation ``inputs_embeds``."""
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return _Output(inputs_embeds, pooled)


class TiedOutput(nn.Module):
    """An output layer that uses the weights of an embedding on the same machine."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a submodule: its weight has one name
        self.bias = None

    @property
    def weight(self) -> Tensor:
        """The embedding's weight [vocabulary, d]."""
        return self._embedding[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden […, d] to logits […, vocabulary]."""
        return functional.linear(hidden, self.weight)


def _shared(original: Any) -> Any:
    """Return a copy of a model that shares its modules until some are replaced."""
    found = copy.copy(original)
    vars(found)["_modules"] = dict(original._modules)
    return found


class WrappedHead(nn.Module):
    """A ``Head`` that wraps the original model without its embedding and blocks."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return logits [b, s, classes], or [b, classes] from a head that pools."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy; ``targets`` [b, t] belong to the first t tokens."""
        logits = self.logits(hidden, mask)
        per_target = logits.reshape(len(targets), -1, logits.shape[-1])  # a pooled head has one
        return _cross_entropy(per_target[:, : targets.shape[1]], targets)

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """Return the most likely class of every token; for a causal model, the next token."""
        best = self.logits(hidden, mask).argmax(-1)
        return [row[real].tolist() for row, real in zip(best, mask.bool(), strict=True)]

    def in_pieces(self, tokens: int, dtype: torch.dtype) -> OutputLayer | None:
        """Return the output layer if its logits of ``tokens`` tokens must be made in pieces; None
        if they fit at once, or if it has adapters."""
        layer = self.original.lm_head
        if not isinstance(layer, nn.Linear | TiedOutput):
            return None
        found = OutputLayer(layer.weight, layer.bias, self.finish)
        return None if found.at_once(tokens, dtype) else found

    def finish(self, logits: Tensor) -> Tensor:
        """Apply what the model's forward does to its output layer's result [n, vocabulary]."""
        raise NotImplementedError


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class TaskHead(WrappedHead):
    """The family's classification head, which gives each token a label."""

    def __init__(self, original: Any) -> None:
        if not hasattr(original.base_model, "layers"):  # else its own forward needs none of them
            pooler = getattr(original.base_model, "pooler", None)
            setattr(original, original.base_model_prefix, Encoded(pooler))
        super().__init__(original)

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return logits [b, s, labels], or [b, labels] from a head that pools."""
        with ForeignDropout():
            return self.original(  # type: ignore[no-any-return]
                inputs_embeds=hidden, attention_mask=mask
            ).logits

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss. Raises ``ConfigError`` for a label that the head lacks."""
        labels, highest = self.original.config.num_labels, int(targets.max())
        if highest >= labels:
            raise ConfigError(
                f"a row has the label {highest}, the head 0 … {labels - 1}; leave such rows out"
            )
        return super().loss(hidden, mask, targets)


class PooledHead(TaskHead):
    """A classification head that gives each sample a label; ``targets`` are [b, 1]."""

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return self.logits(hidden, mask).argmax(-1, keepdim=True).tolist()


class CausalHead(WrappedHead):
    """A decoder-only model after its blocks: further layers, the last norm and the output layer.

    Target i is the token after input i: targets are the inputs, shifted left by one.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        take_input_as_is(original.base_model)

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return logits [b, s, vocabulary]."""
        with ForeignDropout():
            return self.original(  # type: ignore[no-any-return]
                inputs_embeds=hidden, **seeing(mask), use_cache=False
            ).logits

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        if (layer := self.in_pieces(targets.numel(), hidden.dtype)) is None:
            return super().loss(hidden, mask, targets)
        real = targets != IGNORED
        return layer.loss(self.states(hidden, mask)[:, : targets.shape[1]][real], targets[real])

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        if (layer := self.in_pieces(mask.numel(), hidden.dtype)) is None:
            return super().generate(hidden, mask, max_length)
        best = layer.most_likely(self.states(hidden, mask)[mask.bool()])
        return [row.tolist() for row in torch.split(best, mask.bool().sum(1).tolist())]

    def states(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the output layer's input [b, s, d]."""
        with ForeignDropout():
            return self.original.base_model(  # type: ignore[no-any-return]
                inputs_embeds=hidden, **seeing(mask), use_cache=False
            ).last_hidden_state

    def finish(self, logits: Tensor) -> Tensor:
        rest = _shared(self.original)
        rest.lm_head = nn.Identity()
        setattr(rest, rest.base_model_prefix, Encoded(None))
        return rest(inputs_embeds=logits[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


class GPT2Head(CausalHead):
    """GPT-2's last layers, which follow the blocks. Its own forward would add positions again."""

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.original.lm_head(self.states(hidden, mask))  # type: ignore[no-any-return]

    def states(self, hidden: Tensor, mask: Tensor) -> Tensor:
        base, config = self.original.base_model, self.original.config
        with ForeignDropout():
            for layer in base.h:
                if not isinstance(layer, Absent):
                    hidden = apply_layer(layer, config, hidden, mask)
        return base.ln_f(hidden)  # type: ignore[no-any-return]


class Seq2SeqHead(WrappedHead):
    """The part of BART or Marian after the encoder's last layer: the decoder and output layer."""

    def memory(self, hidden: Tensor) -> Tensor:
        """Return the tensor that the decoder attends to, [b, s, d]."""
        return hidden

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        config = self.original.config
        check_length(config, targets)
        inputs = shift_right(targets, config.decoder_start_token_id, config.pad_token_id)
        memory, layer = self.memory(hidden), self.in_pieces(targets.numel(), hidden.dtype)
        with ForeignDropout():
            if layer is None:
                logits = self._decoded(memory, mask, inputs, use_cache=False).logits
                return _cross_entropy(logits, targets)
            states = self.original.get_decoder()(
                inputs, encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False
            ).last_hidden_state
        real = targets != IGNORED
        return layer.loss(states[real], targets[real])

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        config, memory, past = self.original.config, self.memory(hidden), None

        def logits(ids: Tensor, position: int) -> Tensor:
            nonlocal past
            out = self._decoded(memory, mask, ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            return out.logits[:, -1]  # type: ignore[no-any-return]

        start, end = config.decoder_start_token_id, config.eos_token_id
        most = int(min(max_length, most_tokens(config)))
        return decode_greedily(logits, mask, start, end, most)

    def _decoded(self, memory: Tensor, mask: Tensor, ids: Tensor, **cache: Any) -> Any:
        return self.original(
            encoder_outputs=(memory,), attention_mask=mask, decoder_input_ids=ids, **cache
        )

    def finish(self, logits: Tensor) -> Tensor:
        rest = _shared(self.original)
        rest.lm_head = nn.Identity()
        base = rest
        if rest.base_model is not rest:  # T5 has no model within
            base = _shared(rest.base_model)
            setattr(rest, rest.base_model_prefix, base)
        base.decoder = Encoded(None)
        out = rest(encoder_outputs=(logits[None],), decoder_inputs_embeds=logits[None])
        return out.logits[0]  # type: ignore[no-any-return]


class T5Head(Seq2SeqHead):
    """T5's decoder and output layer, with the encoder's last norm, which belongs to no layer."""

    def memory(self, hidden: Tensor) -> Tensor:
        encoder = self.original.get_encoder()
        with ForeignDropout():
            return encoder.dropout(encoder.final_layer_norm(hidden))  # type: ignore[no-any-return]
