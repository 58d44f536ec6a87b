"""What a model must know of a tokeniser, without the library that a device does not need."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Size, ids of special tokens, number of labels."""

    size: int
    pad: int
    bos: int
    eos: int
    num_labels: int = 0

    @property
    def num_classes(self) -> int:
        """What a target can be: labels where the task has them, else tokens."""
        return self.num_labels or self.size
