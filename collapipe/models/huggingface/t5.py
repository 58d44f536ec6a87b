"""T5: its layers share one table of relative position biases, which travels with the activation.

The table, a number for each bucket of distances and each attention head, is a weight of the first
layer, and every layer needs it. So the first block puts it behind the activation, as further rows
of each sample, and the last one takes it off again: what the layers' gradients are by the table
comes back the same way, summed up, and all gradients are those of the unsplit model. It costs
⌈buckets · heads / d⌉ rows, which is one in each of T5's published sizes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_bidirectional_mask

from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.seq2seq import Seq2SeqHead


class Embedding(nn.Module):
    """Tokens; T5 knows positions by their distances alone."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] → [b, s, d]."""
        encoder = self.original.get_encoder()
        with ForeignDropout():
            return encoder.dropout(encoder.embed_tokens(ids))  # type: ignore[no-any-return]


class Block(nn.Module):
    """An encoder layer; only the first has the table, only the last keeps it to itself."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config = original, model.get_encoder().config
        self._first, self._last = index == 0, index == self.config.num_layers - 1

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden [b, s, d] or, with the table's r rows, [b, s + r, d]; mask [b, s]."""
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
        """The table [buckets, heads] as rows [b, r, d], zeros at their end."""
        batch, _, dim = hidden.shape
        flat = self._attention().relative_attention_bias.weight.flatten()
        return functional.pad(flat, (0, -len(flat) % dim)).view(1, -1, dim).expand(batch, -1, -1)

    def _bias(self, rows: Tensor, length: int) -> Tensor:
        """[1, heads, s, s] from the first sample's copy of the table, for all are the same."""
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


class T5Head(Seq2SeqHead):
    """The encoder's last norm stands here: it belongs to no layer."""

    def memory(self, hidden: Tensor) -> Tensor:
        """What the decoder attends to."""
        encoder = self.original.get_encoder()
        with ForeignDropout():
            return encoder.dropout(encoder.final_layer_norm(hidden))  # type: ignore[no-any-return]
