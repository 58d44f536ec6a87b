"""What tasks on one column of texts share: where rows come from, and how long they may be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from collapipe.data.folders import Parse, read_splits
from collapipe.tasks.task import TextLength, VocabularySize
from collapipe.text.splits import Splits


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Where a task's rows come from unless the user's configuration names others.

    Attributes
    ----------
    suffix, parse
        Of the folder's files, and what finds their rows.
    made_up
        Rows as a function of the seed.
    """

    suffix: str
    parse: Parse
    made_up: Callable[[int], Splits]


@dataclass(frozen=True, slots=True)
class TextTask:
    """A task whose rows are a folder's, or made up.

    Attributes
    ----------
    root
        Folder with ``{train,valid,test}.SUFFIX``, plain or .gz; the task's own class says what
        stands in a line.
    synthetic
        Made-up rows.
    vocabulary
        Tokens known to a tokeniser of the task's own, at most.
    max_length
        Tokens of an input, marks among them; what is longer is cut.
    name, columns, heads
        See ``Task``.
    own_rows
        Its folder's files and its made-up rows.
    """

    root: str | None
    synthetic: bool
    vocabulary: VocabularySize
    max_length: TextLength

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    heads: ClassVar[tuple[str, ...]]
    own_rows: ClassVar[OwnRows]

    def splits(self, seed: int) -> Splits:
        """Rows of the folder in its order, or made-up ones, a function of the seed.

        Raises ``DataError`` that names file and line, ``ConfigError`` where there is neither.
        """
        rows = self.own_rows
        if self.synthetic:
            return rows.made_up(seed)
        return read_splits(self.name, self.root, rows.suffix, rows.parse)
