"""A frozen stem: the embedding and first blocks of a model, which never train.

The activation of a row depends on that row alone. Matrix products round differently for different
shapes, so a row computed in a batch or with padding may differ in its last bits. A stem therefore
computes each row separately, without padding and without dropout. On one machine a row then has the
same bits in every batch, whether it is computed or read from the cache on disk, which later epochs
reuse.
"""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from collapipe import __version__
from collapipe.errors import one_line
from collapipe.models import split
from collapipe.process import files
from collapipe.process.folders import in_home
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.frozen_store import default_folder, digest
from collapipe.wire.parts import DAMAGED

_log = logging.getLogger(__name__)
_ACTIVATION, _DIGEST = "activation", "sha256"
_ABANDONED_S = 3600.0  # age of a partial file to remove; writing a row takes less than a second
_LIBRARIES = "torch", "transformers"


def activation_folder(stem: str, model: object, device: torch.device) -> Path:
    """Return ``collapipe/activations/KEY`` in the user's cache.

    The key covers everything except the row that affects an activation's bits. These are the digest
    ``stem`` of the frozen weights and their types, the ``model``'s options, the libraries'
    versions, the number of threads, the machine and its ``device``.
    """
    made_by = [platform.node(), str(device), torch.get_num_threads()]
    made_by += [__version__, *map(version, _LIBRARIES)]
    config = getattr(model, "own_config", None)  # Hugging Face models: options beyond the weights
    key = hashlib.sha256(json.dumps([stem, repr(model), repr(config), made_by]).encode())
    cache = Path(in_home(str(default_folder().parent)))
    return cache / "activations" / key.hexdigest()


class ActivationStore:
    """A folder of safetensors files, each named by the digest of a row's token ids.

    Any number of units may use it at once, because all write the same bits for a row.
    ``limit_bytes`` bounds the size of all files. Units that write at the same time may exceed it
    until each makes a new store. A row without a valid file is computed again. Activations may be
    on any device; ``load`` returns them on the CPU.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        self._left: int | None = None  # bytes; None: not measured yet

    def load(self, ids: Tensor) -> Tensor | None:
        """Return a row's activation; None if it is missing or damaged. Removes a damaged file."""
        file, cause = self._file(ids), "its content has another digest"
        try:
            tensors = load(file.read_bytes())  # a copy: later writes to the file do not change it
        except FileNotFoundError:
            return None
        except (OSError, *DAMAGED) as error:
            tensors, cause = {}, one_line(error)
        if tensors.keys() == {_ACTIVATION, _DIGEST}:
            activation = tensors[_ACTIVATION]
            if torch.equal(tensors[_DIGEST], _check(file, activation)):
                return activation
        _log.warning("%s: %s; the row is computed again", file, cause)
        with suppress(OSError):
            file.unlink()
        return None

    def keep(self, ids: Tensor, activation: Tensor) -> None:
        """Write a row's activation if ``limit_bytes`` allows it; log a warning if writing fails."""
        file, own = self._file(ids), activation.cpu().contiguous()
        data = save({_ACTIVATION: own, _DIGEST: _check(file, own)})
        try:
            if self._left is None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._left = self._limit_bytes - _size(self.folder)
            if len(data) <= self._left:
                self._left -= len(data)
                # atomically, because another unit may read the same row meanwhile
                with files.replacing(file, files.PRIVATE, durable=False) as partial:
                    partial.write_bytes(data)
        except OSError as error:
            self._left = 0
            _log.warning("%s: no more activations are kept in this round (%s)", file, error)

    def _file(self, ids: Tensor) -> Path:
        row = hashlib.sha256(ids.cpu().contiguous().numpy().data).hexdigest()
        return self.folder / f"{row}.safetensors"


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, and remove partial files of killed processes."""
    size, now = 0, time.time()
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a partial file that was renamed meanwhile
            status = file.stat()
            if file.name.startswith(".") and now - status.st_mtime > _ABANDONED_S:
                file.unlink()
            else:
                size += status.st_size
    return size


def _check(file: Path, activation: Tensor) -> Tensor:
    """Return the digest of an activation and its row, uint8 [32]."""
    return torch.frombuffer(bytearray.fromhex(digest({file.stem: activation})), dtype=torch.uint8)


@dataclass(frozen=True)
class StemSpec(split.DerivedSpec):
    """Model that treats the embedding and first ``frozen_blocks`` blocks of ``base`` as embedding.

    Weights are drawn in the order of ``base``, so the same seed gives the same weights. The stem's
    weights have the names of ``base`` with the prefix ``embedding.``; the remaining blocks are
    numbered from 0 (``in_base`` restores the names). ``store`` caches the stem's activations.
    """

    frozen_blocks: int
    store: ActivationStore | None = field(default=None, compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that follow the stem."""
        return self.base.num_blocks - self.frozen_blocks

    def name_in_base(self, name: str) -> str:
        part, _, rest = name.partition(".")
        if part == split.EMBEDDING:
            return rest
        if part == split.HEAD:
            return name
        index, _, rest = rest.partition(".")
        return f"{split.block_name(int(index) + self.frozen_blocks)}.{rest}"

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        embedding = self.base.build_embedding(vocabulary)
        blocks = [self.base.build_block(index) for index in range(self.frozen_blocks)]
        return Stem(embedding, blocks, self.store)

    def build_block(self, index: int) -> nn.Module:
        return self.base.build_block(self.frozen_blocks + index)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        return self.base.build_head(vocabulary)


class Stem(split.MaskedEmbedding):
    """Embedding and first blocks, applied row by row in evaluation mode and without gradients."""

    def __init__(
        self,
        embedding: nn.Module,
        blocks: Sequence[nn.Module],
        store: ActivationStore | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self._store = embedding, nn.ModuleList(blocks), store
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Stem":
        """Stay in evaluation mode, so that no dropout is applied."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states [b, s + r, d], zero at padding; T5 blocks append r shared rows."""
        rows = [
            torch.cat([self._row(ids[real == n]) for n in range(1, int(real.max()) + 1)])
            for ids, real in zip(inputs, mask, strict=True)
        ]
        return _padded(rows, mask.bool().sum(1).tolist(), mask.shape[1])

    def _row(self, ids: Tensor) -> Tensor:
        """Return the last block's output [n + r, d] for the n tokens of one row."""
        kept = self._store.load(ids) if self._store else None
        if kept is not None:
            return kept.to(ids.device)
        hidden, mask = self.embedding(ids[None]), torch.ones_like(ids[None], dtype=torch.bool)
        row = split.through(self.blocks, hidden, mask)[0]
        if self._store:
            self._store.keep(ids, row)
        return row


def _padded(rows: Sequence[Tensor], lengths: Sequence[int], width: int) -> Tensor:
    """Stack rows to [b, width + r, d]: a row's tokens, zeros, then its r shared rows."""
    further = len(rows[0]) - lengths[0]
    hidden = rows[0].new_zeros(len(rows), width + further, rows[0].shape[1])
    for place, row, length in zip(hidden, rows, lengths, strict=True):
        place[:length], place[width:] = row[:length], row[length:]
    return hidden
