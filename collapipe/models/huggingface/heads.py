"""Heads, the parts after the blocks: a task head, a causal model's last layers, or a decoder."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling

from collapipe.errors import ConfigError
from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.layers import apply_layer, check_length
from collapipe.models.split import decode_greedily, shift_right
from collapipe.tensors import IGNORED


class Encoded(nn.Module):
    """Placeholder for an encoder that another machine has run: it returns its input."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *none: None, inputs_embeds: Tensor, **named: Any) -> Any:
        """Return the encoder's output, given its last layer's activation ``inputs_embeds``."""
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(inputs_embeds, pooled)


class TiedOutput(nn.Module):
    """An output layer that uses the weights of an embedding on the same machine."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # not a submodule: its weight has one name

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden […, d] to logits […, vocabulary]."""
        return functional.linear(hidden, self._embedding[0].weight)


class _Head(nn.Module):
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
        return [row[real].tolist() for row, real in zip(best, mask, strict=True)]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class TaskHead(_Head):
    """The family's classification head, which gives each token a label."""

    def __init__(self, original: Any) -> None:
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
                f"the data has a label {highest}, counted from 0; the model's head has {labels}"
            )
        return super().loss(hidden, mask, targets)


class PooledHead(TaskHead):
    """A classification head that gives each sample a label; ``targets`` are [b, 1]."""

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return self.logits(hidden, mask).argmax(-1, keepdim=True).tolist()


class CausalHead(_Head):
    """A causal model's layers after the blocks, the last norm and the output layer.

    Target i is the token after input i: targets are the inputs, shifted left by one. Continuing a
    text would need one pass of the whole pipeline per token; an exported model can generate.
    """

    def __init__(self, original: Any, first: int, layers: str) -> None:
        super().__init__(original)
        self._first, self._layers = first, layers

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return logits [b, s, vocabulary]."""
        base, config = self.original.base_model, self.original.config
        layers = self.original.get_submodule(self._layers)
        rotary = getattr(base, "rotary_emb", None)
        with ForeignDropout():
            for index in range(self._first, len(layers)):
                hidden = apply_layer(layers[index], index, config, rotary, hidden, mask)
            norm = base.ln_f if hasattr(base, "ln_f") else base.norm
            return self.original.lm_head(norm(hidden))  # type: ignore[no-any-return]


class Seq2SeqHead(_Head):
    """The part of BART or Marian after the encoder's last layer: the decoder and output layer."""

    def memory(self, hidden: Tensor) -> Tensor:
        """Return the tensor that the decoder attends to, [b, s, d]."""
        return hidden

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        config = self.original.config
        check_length(config, targets)
        inputs = shift_right(targets, config.decoder_start_token_id, config.pad_token_id)
        with ForeignDropout():
            logits = self._decoded(self.memory(hidden), mask, inputs, use_cache=False).logits
        return _cross_entropy(logits, targets)

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        config, memory, past = self.original.config, self.memory(hidden), None

        def logits(ids: Tensor, position: int) -> Tensor:
            nonlocal past
            out = self._decoded(memory, mask, ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            return out.logits[:, -1]  # type: ignore[no-any-return]

        start, end = config.decoder_start_token_id, config.eos_token_id
        return decode_greedily(logits, mask, start, end, max_length)

    def _decoded(self, memory: Tensor, mask: Tensor, ids: Tensor, **cache: Any) -> Any:
        return self.original(
            encoder_outputs=(memory,), attention_mask=mask, decoder_input_ids=ids, **cache
        )


class T5Head(Seq2SeqHead):
    """T5's decoder and output layer, with the encoder's last norm, which belongs to no layer."""

    def memory(self, hidden: Tensor) -> Tensor:
        encoder = self.original.get_encoder()
        with ForeignDropout():
            return encoder.dropout(encoder.final_layer_norm(hidden))  # type: ignore[no-any-return]
