"""An audit's inputs: the run, its private rows, and the attacker's public rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from collapipe.audit.texts import Texts
from collapipe.config import Settings
from collapipe.data.columns import standard
from collapipe.data.files import read_file
from collapipe.data.sources import columns_of
from collapipe.models.split import SplitModel
from collapipe.runs.model import load_model
from collapipe.runs.rows import load_validation
from collapipe.seeds import derive
from collapipe.tasks.task import Examples
from collapipe.text.tokenizer import Tokenizer

_MOST_PUBLIC = 1000  # rows


@dataclass(frozen=True, slots=True)
class Material:
    """A finished run, and private and public rows as ``Texts`` and as training examples.

    Public examples have no labels. ``unit`` selects a model if each unit has one. ``public_sha256``
    is the hash of the whole file."""

    settings: Settings
    model: SplitModel
    tokenizer: Tokenizer
    unit: int | None
    private: Texts
    public: Texts
    examples: Examples
    public_examples: Examples
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
        held = drawn(load_validation(settings), rows, settings.seed)
        known, vocabulary = settings.task.inputs(texts, tokenizer), tokenizer.vocabulary
        private = settings.task.encode(held, tokenizer)
        return cls(
            settings,
            model,
            tokenizer,
            unit,
            Texts.of(private, vocabulary, "the validation rows"),
            Texts.of(known, vocabulary, f"--public {public}"),
            private,
            known,
            hashlib.sha256(public.read_bytes()).hexdigest(),
        )


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
