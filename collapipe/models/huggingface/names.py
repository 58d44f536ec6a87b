"""A weight's name in the original model ↔ its name here; the only place that knows both.

Behind ``original.`` stands the original's own name, in a block what follows the layer's number:
``bert.encoder.layer.3.output.dense.weight`` is ``blocks.3.original.output.dense.weight``, and
``classifier.bias`` is ``head.original.classifier.bias``.
"""

from dataclasses import dataclass

from collapipe.models.huggingface.families import Family
from collapipe.models.split import EMBEDDING, HEAD, block_name

_MARK = ".original."


@dataclass(frozen=True)
class Names:
    """The names of a model of ``family`` whose first ``num_blocks`` layers are blocks."""

    family: Family
    num_blocks: int

    def part(self, original: str) -> str:
        """The part that has a weight: ``embedding``, ``blocks.3`` or ``head``."""
        prefix = f"{self.family.layers}."
        if original.startswith(prefix):
            index = int(original.removeprefix(prefix).partition(".")[0])
            return block_name(index) if index < self.num_blocks else HEAD
        return EMBEDDING if original.startswith(self.family.embedding) else HEAD

    def to_ours(self, original: str) -> str:
        """Name in the split model."""
        part = self.part(original)
        return f"{part}{_MARK}{original.removeprefix(self._stem(part))}"

    def to_original(self, ours: str) -> str:
        """The inverse of ``to_ours``."""
        part, _, rest = ours.partition(_MARK)
        return f"{self._stem(part)}{rest}"

    def _stem(self, part: str) -> str:
        """What the part's names in the original have in common."""
        if part in (EMBEDDING, HEAD):
            return ""
        return f"{self.family.layers}.{part.rpartition('.')[2]}."
