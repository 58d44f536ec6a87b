"""BERT, RoBERTa, ELECTRA, DistilBERT: embeddings, layers that see all tokens, a task head."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_bidirectional_mask

from collapipe.batch import IGNORED
from collapipe.errors import ConfigError
from collapipe.models.dropout import ForeignDropout
from collapipe.models.huggingface.absent import Encoded
from collapipe.models.huggingface.length import check_length


class Embedding(nn.Module):
    """What stands before the first layer; ELECTRA has a projection there, too."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] → [b, s, d]."""
        check_length(self.original.config, ids)
        base = self.original.base_model
        with ForeignDropout():
            hidden: Tensor = base.embeddings(ids)
            if hasattr(base, "embeddings_project"):
                hidden = base.embeddings_project(hidden)
        return hidden


class Block(nn.Module):
    """A layer that sees all tokens of its sample; BART and Marian have such layers, too."""

    def __init__(self, original: nn.Module, model: Any, index: int) -> None:
        super().__init__()
        self.original, self.config = original, model.config

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden [b, s, d], mask [b, s] True at tokens → [b, s, d]."""
        seen = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=mask
        )
        with ForeignDropout():
            return self.original(hidden, attention_mask=seen)  # type: ignore[no-any-return]


class TaskHead(nn.Module):
    """The family's own classification head; a ``Head``."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        pooler = getattr(original.base_model, "pooler", None)
        setattr(original, original.base_model_prefix, Encoded(pooler))
        self.original = original

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[b, s, labels] over tokens, [b, labels] where the head pools."""
        with ForeignDropout():
            return self.original(  # type: ignore[no-any-return]
                inputs_embeds=hidden, attention_mask=mask
            ).logits

    def _check(self, targets: Tensor) -> None:
        labels, highest = self.original.config.num_labels, int(targets.max())
        if highest >= labels:
            raise ConfigError(
                f"the data has a label {highest}, counted from 0; the model's head has {labels}"
            )


class TokenHead(TaskHead):
    """A label for each token."""

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy; ``targets`` [b, t] are the labels of the first t tokens."""
        self._check(targets)
        logits = self.logits(hidden, mask)[:, : targets.shape[1]]
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """The likeliest label of every token."""
        best = self.logits(hidden, mask).argmax(-1)
        return [row[real].tolist() for row, real in zip(best, mask, strict=True)]


class PooledHead(TaskHead):
    """A label for each sample."""

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy; ``targets`` [b, 1]."""
        self._check(targets)
        logits = self.logits(hidden, mask)
        return functional.cross_entropy(
            logits, targets[:, 0], ignore_index=IGNORED, reduction="sum"
        )

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """The likeliest label, one for each sample."""
        return self.logits(hidden, mask).argmax(-1, keepdim=True).tolist()
