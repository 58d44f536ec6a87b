"""BART and Marian: encoder layers on devices, the whole decoder and output layer behind them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe.batch import IGNORED
from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.length import check_length


class Embedding(nn.Module):
    """The encoder, whose layers let pass what comes before them."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] → [b, s, d]."""
        check_length(self.original.config, ids)
        with ForeignDropout():
            return self.original.get_encoder()(ids).last_hidden_state  # type: ignore[no-any-return]


class Seq2SeqHead(nn.Module):
    """All that stands behind the encoder's last layer; a ``Head``."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def memory(self, hidden: Tensor) -> Tensor:
        """What the decoder attends to; T5 has more to do here."""
        return hidden

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of ``targets`` [b, t], each predicted from those before it."""
        config = self.original.config
        check_length(config, targets)
        before = targets.masked_fill(targets == IGNORED, config.pad_token_id)[:, :-1]
        start = targets.new_full((targets.shape[0], 1), config.decoder_start_token_id)
        with ForeignDropout():
            logits = self.original(
                encoder_outputs=(self.memory(hidden),),
                attention_mask=mask,
                decoder_input_ids=torch.cat((start, before), 1),
                use_cache=False,
            ).logits
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """Greedy decoding of a batch at once, with cached keys and values."""
        config, memory, past = self.original.config, self.memory(hidden), None
        ids = mask.new_full((len(hidden), 1), config.decoder_start_token_id, dtype=torch.long)
        done = mask.new_zeros(len(hidden), dtype=torch.bool)
        for _ in range(max_length):
            out = self.original(
                encoder_outputs=(memory,),
                attention_mask=mask,
                decoder_input_ids=ids[:, -1:],
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            following = out.logits[:, -1].argmax(-1).masked_fill(done, config.eos_token_id)
            ids = torch.cat((ids, following[:, None]), 1)
            done |= following == config.eos_token_id
            if bool(done.all()):
                break
        return [_until(row, config.eos_token_id) for row in ids[:, 1:].tolist()]


def _until(row: list[int], mark: int) -> list[int]:
    return row[: row.index(mark)] if mark in row else row
