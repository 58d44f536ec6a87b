"""GPT-2, Llama, Qwen2: the first layers on devices, the others with the output layer."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from collapipe.batch import IGNORED
from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.length import check_length


class Embedding(nn.Module):
    """Tokens, and positions where they are learned (GPT-2) and not rotary."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] → [b, s, d]."""
        base = self.original.base_model
        hidden: Tensor = base.get_input_embeddings()(ids)
        if hasattr(base, "wpe"):
            check_length(self.original.config, ids)
            with ForeignDropout():
                hidden = base.drop(hidden + base.wpe(_places(ids)))
        return hidden


class Block(nn.Module):
    """A layer in which a token sees those before it."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config, self.index = original, model.config, index
        self.rotary = copy.deepcopy(getattr(model.base_model, "rotary_emb", None))  # no weights

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden [b, s, d], mask [b, s] True at tokens → [b, s, d]."""
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
    """Layer ``index`` of the model; positions count from the left, for padding is on the right."""
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


class CausalHead(nn.Module):
    """The layers that are left, the last norm and the output layer; a ``Head``.

    Target i is what follows input i: targets are the inputs, shifted by one to the left.
    """

    def __init__(self, original: Any, first: int, layers: str) -> None:
        super().__init__()
        self.original = original
        self._first, self._layers = first, layers

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[b, s, vocabulary]."""
        base, config = self.original.base_model, self.original.config
        layers = self.original.get_submodule(self._layers)
        rotary = getattr(base, "rotary_emb", None)
        with ForeignDropout():
            for index in range(self._first, len(layers)):
                hidden = apply_layer(layers[index], index, config, rotary, hidden, mask)
            norm = base.ln_f if hasattr(base, "ln_f") else base.norm
            return self.original.lm_head(norm(hidden))  # type: ignore[no-any-return]

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of ``targets`` [b, t], t ≤ s."""
        logits = self.logits(hidden, mask)[:, : targets.shape[1]]
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """What the model expects behind each of a sample's tokens.

        More needs the whole pipeline once a token; an exported model has ``generate`` for it.
        """
        best = self.logits(hidden, mask).argmax(-1)
        return [row[real].tolist() for row, real in zip(best, mask, strict=True)]
