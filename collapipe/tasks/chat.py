"""Conversations: the model learns the assistant's answers to the messages before them."""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import accumulate
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.data.conversations import MESSAGES, PLACE
from collapipe.data.folders import Splits
from collapipe.errors import ConfigError, DataError, one_line
from collapipe.tasks.causal_lm import ContinuedText, Ids, Sequences, alone
from collapipe.tasks.task import TextLength, VocabularySize
from collapipe.tasks.text_task import TRUNCATED
from collapipe.tensors import IGNORED, MOST_PACKED
from collapipe.text.chat_template import USER, Answers, ChatTemplate, Renderer
from collapipe.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_RENDERED, _ENCODED = 32, 2**20  # at once: conversations, and their characters or one of them
_TRIAL = "Hello."


@dataclass(frozen=True, slots=True)
class Chat(ContinuedText):
    """Conversations; rows have the column ``messages``, each with ``role`` and ``content``."""

    vocabulary: VocabularySize
    max_length: TextLength
    chat_template: str | None = None  # file of a template in Jinja; None: the tokeniser's own
    packing: bool = True  # whether training puts several short conversations into one row

    name = "chat"
    columns = ("prompt", "completion", MESSAGES)

    def splits(self, seed: int) -> Splits:
        raise ConfigError(
            "task chat: no rows; set data.train_file=FILE (JSON lines) or data.name=HUB_NAME"
        )

    def texts(self, rows: Dataset) -> Iterator[list[str]]:
        return ([each["content"] for each in messages] for messages in rows[MESSAGES])

    def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokeniser with the run's chat template.

        Raises ``ConfigError`` without a template, or if it cannot render a message.
        """
        found = tokenizer.chat_template
        if (file := self.chat_template) is not None:
            own = {f"{name}_token": each for name, each in asdict(tokenizer.special_tokens).items()}
            tokens = found.special_tokens if found else own
            try:
                source = Path(file).read_text("utf-8")
                found = ChatTemplate(source, tokens, date.today().isoformat())
            except (OSError, ValueError, ConfigError) as error:
                raise ConfigError(
                    f"task.chat_template={file}: cannot be used ({one_line(error)}); name a file "
                    "with a template in Jinja"
                ) from error
        _prompt(Renderer(template := _template(found)), _TRIAL)
        return replace(tokenizer, chat_template=template)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Sequences:
        """Encode conversations, packed if the run packs. Raises ``DataError`` with a row's place if
        the template refuses it, or if no answer is left."""
        return self._encode(rows, tokenizer, self.packing)

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Sequences:
        return self._encode(rows, tokenizer, packing=False)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Sequences:
        """Return each text as a user's message, with the heading of the assistant's answer."""
        renderer = Renderer(_template(tokenizer.chat_template))
        prompts = tokenizer.encode_chat([_prompt(renderer, text) for text in texts])
        ends = self.last_tokens([ids.tolist() for ids, _ in prompts], 0)
        return Sequences.to_continue(ends, tokenizer)

    def _encode(self, rows: Dataset, tokenizer: Tokenizer, packing: bool) -> Sequences:
        room, cut = self.max_length + 1, 0
        ids, targets = list[Ids](), list[Ids]()
        for tokens, answers in _tokens(rows, tokenizer):
            cut += len(tokens) > room
            own = np.where(answers[:room], tokens[:room], np.int32(IGNORED))
            if (own[1:] != IGNORED).any():
                ids.append(tokens[:room].copy())  # a view would keep the rest in memory
                targets.append(own)
        if cut:
            _log.warning(TRUNCATED, cut, len(rows), "conversations", self.max_length)
        if left_out := len(rows) - len(ids):
            _log.warning(
                "%d of %d conversations have no answer and were left out", left_out, len(rows)
            )
        if not ids:
            raise DataError(
                f"all {len(rows)} conversations lack an answer of the assistant within "
                f"task.max_length={self.max_length} tokens; raise it",
                "its conversations have no answer within task.max_length",
            )
        sizes = [len(each) - 1 for each in ids]
        starts = [*accumulate(map(len, ids), initial=0)]
        packed = pack(sizes, self.max_length) if packing else alone(len(sizes))
        joined = np.concatenate(ids), np.concatenate(targets)
        return Sequences(*joined, starts, sizes, packed, tokenizer)


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put items into as few rows of at most ``room`` as best fit, the longest first, finds.

    Returns the items' numbers in each row, at most ``MOST_PACKED``. ``sizes`` are at most ``room``.
    """
    rows, spaces = list[list[int]](), list[tuple[int, int]]()  # (space left, row), sorted
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect_left(spaces, (sizes[item], 0))
        if place == len(spaces):
            spaces.append((room, len(rows)))
            rows.append([])
        space, row = spaces.pop(place)
        rows[row].append(item)
        if len(rows[row]) < MOST_PACKED:
            insort(spaces, (space - sizes[item], row))
    return rows


def _tokens(rows: Dataset, tokenizer: Tokenizer) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    """Yield each conversation's token ids, and which of them are the assistant's."""
    some, size = list[tuple[str, Answers]](), 0
    for each in _rendered(rows, _template(tokenizer.chat_template)):
        some.append(each)
        size += len(each[0])
        if size > _ENCODED:
            yield from _encoded(some, tokenizer)
            some, size = [], 0
    yield from _encoded(some, tokenizer)


def _rendered(rows: Dataset, template: ChatTemplate) -> Iterator[tuple[str, Answers]]:
    renderer = Renderer(template)
    for some in rows.iter(_RENDERED):
        found = renderer.answers(some[MESSAGES])
        for place in some[PLACE]:
            try:
                yield next(found)
            except ValueError as error:
                public_message = "the chat template refuses one of its conversations"
                raise DataError(f"{place}: {error}", public_message) from error


def _encoded(
    texts: Sequence[tuple[str, Answers]], tokenizer: Tokenizer
) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    encoded = tokenizer.encode_chat([text for text, _ in texts])
    for (_, answers), (ids, places) in zip(texts, encoded, strict=True):
        firsts, ends = np.array([(-1, -1), *sorted(answers)]).T
        begun = np.searchsorted(firsts, places[:, 1]) - 1  # the last answer before a token's end
        yield ids, np.maximum.accumulate(ends)[begun] > places[:, 0]


def _template(found: ChatTemplate | None) -> ChatTemplate:
    if found is None:
        raise ConfigError(
            "task=chat: the tokeniser has no chat template; set task.chat_template=FILE, or a "
            "model that has one"
        )
    return found


def _prompt(renderer: Renderer, text: str) -> str:
    try:
        return renderer.prompt([{"role": USER, "content": text}])
    except ValueError as error:
        raise ConfigError(f"a message {text!r:.40}: {error}") from error
