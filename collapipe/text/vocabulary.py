"""The properties of a tokeniser that a model needs, without the tokenizers library."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Number of tokens, ids of special tokens, and number of labels."""

    size: int
    pad: int
    bos: int
    eos: int
    num_labels: int = 0

    @property
    def num_classes(self) -> int:
        """Number of classes of a target: labels if the task has them, else tokens."""
        return self.num_labels or self.size
