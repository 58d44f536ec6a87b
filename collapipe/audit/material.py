"""An audit's inputs: a run, private and public rows, and activations as its server gets them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from collapipe.config import Settings
from collapipe.data.files import read_file
from collapipe.data.sources import columns_of, standard
from collapipe.errors import DataError
from collapipe.models.cut import CutSpec
from collapipe.models.dropout import drawing_from
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import ModelSpec, SplitModel, build_empty, masks_for
from collapipe.models.stem import StemSpec
from collapipe.runs.model import load_model
from collapipe.runs.reading import reported_labels
from collapipe.runs.rows import load_rows
from collapipe.seeds import derive
from collapipe.tasks.chat import Chat
from collapipe.tasks.evaluation import by_length
from collapipe.tasks.task import Examples
from collapipe.tensors import Batch
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression.codec import decode, encode

AT_ONCE = 32  # rows of a batch
_MOST_PUBLIC = 1000  # rows


@dataclass(frozen=True, slots=True)
class Texts:
    """Rows in batches of similar length, and their n tokens without padding.

    Tokens have ``ids``, ``places`` in their rows, ``rows``, and ``real`` (False for BOS and EOS),
    each [n]."""

    batches: tuple[Batch, ...]
    ids: Tensor
    places: Tensor
    rows: Tensor
    real: Tensor

    @classmethod
    def of(cls, examples: Examples, vocabulary: Vocabulary, where: str) -> "Texts":
        """Batch examples. Raises ``DataError``, which names ``where``, if no token is real."""
        batches = tuple(map(examples.batch, by_length(examples, AT_ONCE)))
        ids = torch.cat([each.inputs[each.mask] for each in batches])
        within = [each.mask.nonzero() for each in batches]
        rows = torch.cat([n * AT_ONCE + each[:, 0] for n, each in enumerate(within)])
        special = torch.tensor([vocabulary.bos, vocabulary.eos, vocabulary.pad])
        real = ~torch.isin(ids, special)
        if not bool(real.any()):
            raise DataError(f"{where}: have only special tokens; choose other rows")
        return cls(batches, ids, torch.cat([each[:, 1] for each in within]), rows, real)

    @property
    def num_rows(self) -> int:
        return int(self.rows.max()) + 1

    def by_row(self, counted: Tensor) -> Tensor:
        """Return, for each row [r], the number of its tokens that are ``counted`` [n]."""
        return torch.bincount(self.rows[counted], minlength=self.num_rows)

    def sent(self, read: RowsRead) -> Tensor:
        """Return True for the tokens, [n], whose rows are sent to a head."""
        each = [read.of(b.mask, b.targets)[:, : b.mask.shape[1]][b.mask] for b in self.batches]
        return torch.cat(each)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Embedding and blocks of a run's model, for any cut between units and server.

    The first ``num_frozen`` parts, including the embedding, are a frozen stem, which computes
    without dropout.
    """

    model: SplitModel
    num_frozen: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, model: SplitModel, vocabulary: Vocabulary) -> "Encoder":
        """Return the encoder of a model of ``spec``; weights are shared, not copied."""
        weights, frozen = dict(model.state_dict()), 0
        if isinstance(spec, CutSpec):
            weights, spec = spec.in_base(weights), spec.base
        if isinstance(spec, StemSpec):
            weights, frozen, spec = spec.in_base(weights), spec.frozen_blocks + 1, spec.base
        whole = spec
        return cls(build_empty(lambda: SplitModel(whole, vocabulary), weights), frozen)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Map ids [c, s] without padding to embeddings [c, s, d]."""
        self.model.eval()
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden: Tensor = self.model.embedding(ids, *masks_for(self.model.embedding, mask))
        return hidden.float()

    @torch.no_grad()
    def activations(self, texts: Texts, dropout: torch.Generator | None) -> Iterator[Tensor]:
        """Yield all tokens' rows [n, d] after the embedding and after each block.

        With ``dropout`` they are computed as in training, else without dropout.
        """
        hidden: list[Tensor] = []
        for number, part in enumerate((self.model.embedding, *self.model.blocks)):
            part.train(dropout is not None and number >= self.num_frozen)
            with drawing_from(dropout or torch.Generator()):
                if not hidden:
                    hidden = [part(b.inputs, *masks_for(part, b.mask)) for b in texts.batches]
                else:
                    pairs = zip(hidden, texts.batches, strict=True)
                    hidden = [part(each, b.mask) for each, b in pairs]
            widths = [b.mask.shape[1] for b in texts.batches]  # T5's blocks append further rows
            rows = [
                each[:, :width][b.mask]
                for each, width, b in zip(hidden, widths, texts.batches, strict=True)
            ]
            yield torch.cat(rows).float()
        self.model.eval()


def travelled(rows: Tensor, precision: str, noise: float, generator: torch.Generator) -> Tensor:
    """Return activations [n, d] as they arrive: with noise, and rounded as on the decoder link.

    The Gaussian noise has ``noise`` times each row's norm."""
    if noise:
        drawn = torch.randn(rows.shape, generator=generator)
        rows = rows + noise * rows.norm(dim=1, keepdim=True) / rows.shape[1] ** 0.5 * drawn
    return decode(encode(rows, precision, generator), rows.shape, precision, rows.dtype)


@dataclass(frozen=True, slots=True)
class Material:
    """A finished run, and private and public rows as ``Texts`` and as training examples.

    Public examples have no labels. ``unit`` selects a model if each unit has one. ``label_counts``
    are the units' training rows of each label, [c], as they reported them. ``public_sha256`` is the
    hash of the whole file."""

    settings: Settings
    model: SplitModel
    tokenizer: Tokenizer
    unit: int | None
    private: Texts
    public: Texts
    examples: Examples
    public_examples: Examples
    label_counts: Tensor
    public_sha256: str

    @classmethod
    def of(
        cls, run_dir: Path, trusted: Sequence[str], unit: int | None, public: Path, rows: int
    ) -> "Material":
        """Load a run, ``rows`` of its validation rows, and rows of the file ``public``.

        Raises ``ConfigError`` or ``DataError`` if the folder or rows cannot be read.
        """
        settings, model, tokenizer = load_model(run_dir, trusted, unit)
        texts = _public_texts(settings, public)
        held = drawn(load_rows(settings, "validation"), rows, settings.seed)
        known, vocabulary = settings.task.inputs(texts, tokenizer), tokenizer.vocabulary
        task = settings.task  # packed conversations do not see each other: as each alone
        encode = task.encode_apart if isinstance(task, Chat) else task.encode
        private, reported = encode(held, tokenizer), reported_labels(run_dir)
        return cls(
            settings,
            model,
            tokenizer,
            unit,
            Texts.of(private, vocabulary, "the validation rows"),
            Texts.of(known, vocabulary, f"--public {public}"),
            private,
            known,
            torch.tensor([float(reported[label]) for label in tokenizer.labels]),
            hashlib.sha256(public.read_bytes()).hexdigest(),
        )

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a generator of random numbers, seeded by the run's seed and their purpose."""
        return torch.Generator().manual_seed(derive(self.settings.seed, "audit", *purpose))


def _public_texts(settings: Settings, file: Path) -> list[str]:
    """Return texts of the task's first column, or of a file's lines; lists are joined by blanks."""
    column = settings.task.columns[0]
    names = columns_of(settings.data, [column])
    rows = read_file(file, "--public", names.values())
    if rows.column_names == ["text"]:
        names = {column: "text"}
    found = standard(rows.select(range(min(len(rows), _MOST_PUBLIC))), names, str(file))[column][:]
    return [each if isinstance(each, str) else " ".join(each) for each in found]


def drawn(rows: Dataset, count: int, seed: int) -> Dataset:
    """Return at most ``count`` random rows, because files are often sorted."""
    order = np.random.default_rng(derive(seed, "audit", "rows")).permutation(len(rows))
    return rows.select(np.sort(order[:count]))
