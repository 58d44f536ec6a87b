"""Continue texts with a causal model by transformers' ``generate``, with a key-value cache."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from collapipe.errors import ConfigError
from collapipe.tasks.evaluation import Prediction, rows_at_once
from collapipe.tasks.task import Task
from collapipe.tensors import mask_of, padded
from collapipe.text.chat_template import ASSISTANT, USER, Message, Renderer
from collapipe.text.tokenizer import Tokenizer

_ANSWER = 256  # tokens of an answer
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a causal model continues a text, by at most ``max_new_tokens`` tokens.

    None means 256 tokens, or as many as the model has positions left for. With a ``temperature``
    above 0, tokens are drawn from ``seed``: logits are divided by it, and only the most likely
    tokens that together have the probability ``top_p`` can be drawn.
    """

    max_new_tokens: int | None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--temperature", self.temperature), ("--top-p", self.top_p)):
            if not math.isfinite(value):
                raise ConfigError(f"{option} {value}: must be a finite number")
        if self.top_p < 1 and not self.temperature > 0:
            raise ConfigError(f"--top-p {self.top_p:g}: draws tokens; add --temperature 1")


class Generator:
    """Continues texts with a causal ``model`` of transformers.

    With ``scored`` a prediction has the natural logarithm of its probability. Tokens are drawn from
    torch's global generator, which is seeded here.
    """

    def __init__(
        self, model: Any, task: Task, tokenizer: Tokenizer, decoding: Decoding, scored: bool = False
    ) -> None:
        self._model, self._task, self._tokenizer = model, task, tokenizer
        vocabulary, own = tokenizer.vocabulary, model.config.eos_token_id
        self._most_new = decoding.max_new_tokens
        self._ends = {vocabulary.eos, *(own if isinstance(own, list) else [own])} - {None}
        drawn = {"do_sample": True, "temperature": decoding.temperature, "top_p": decoding.top_p}
        self._config = model.generation_config = GenerationConfig(  # in place of config.json's
            eos_token_id=sorted(self._ends),
            pad_token_id=vocabulary.pad,
            return_dict_in_generate=True,
            output_logits=scored,
            **({**drawn, "top_k": 0} if decoding.temperature > 0 else {}),
        )
        torch.manual_seed(decoding.seed)

    def predict(self, texts: Sequence[str], show: Show | None = None) -> Iterator[Prediction]:
        """Yield the continuations of ``texts``; ``show`` gets the pieces of a single one."""
        size = rows_at_once(self._task, self._tokenizer, self._model.config.hidden_size)
        for start in range(0, len(texts), size):
            some = texts[start : start + size]
            batch = self._task.inputs(some, self._tokenizer).batch(range(len(some)))
            given = zip(batch.inputs, batch.mask, strict=True)
            yield from self.continued([row[real].tolist() for row, real in given], show)

    @torch.inference_mode()
    def continued(
        self, rows: Sequence[Sequence[int]], show: Show | None = None
    ) -> list[Prediction]:
        """Continue rows of token ids. Raises ``ConfigError`` if the model has no positions left."""
        backwards = [row[::-1] for row in rows]  # so that padding is on the left
        ids = padded(backwards, self._tokenizer.vocabulary.pad).flip(1)
        self._config.max_new_tokens = self._room(ids.shape[1])
        found = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask_of(backwards).flip(1).to(self._model.device),
            generation_config=self._config,
            streamer=show and _Streamer(self._tokenizer, show),
        )
        new = found.sequences[:, ids.shape[1] :]
        written = [self._until_end(row) for row in new.tolist()]
        texts = self._tokenizer.decode(written)
        if not self._config.output_logits:
            return [Prediction(text) for text in texts]
        each = _log_probabilities(found.logits, new)
        return [
            Prediction(text, {"log_probability": float(row[: len(ids)].sum())})
            for text, row, ids in zip(texts, each, written, strict=True)
        ]

    def _until_end(self, row: Sequence[int]) -> Sequence[int]:
        """Return the ids up to and including the first end."""
        end = next((place for place, token in enumerate(row) if token in self._ends), len(row))
        return row[: end + 1]

    def _room(self, width: int) -> int:
        """Return how many tokens may follow ``width`` tokens. Raises ``ConfigError``."""
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if positions is not None and width + (new := self._most_new or 1) > positions:
            full = f"the model has {positions} positions, and the text before has {width} tokens"
            if self._most_new is None:
                raise ConfigError(f"{full}; shorten it, or begin a new conversation")
            raise ConfigError(f"--max-new-tokens {new}: {full}; lower it, or shorten the text")
        return self._most_new or min(_ANSWER, _ANSWER if positions is None else positions - width)


class Conversation:
    """Answers texts as a user's messages in one conversation, by the tokeniser's chat template."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self._generator, self._tokenizer = generator, tokenizer
        self._renderer, self._messages = Renderer(tokenizer.chat_template), list[Message]()

    def predict(self, texts: Sequence[str], show: Show | None = None) -> Iterator[Prediction]:
        """Yield an answer to each text; ``show`` gets its pieces before. Raises ``ConfigError`` if
        the template fails."""
        for text in texts:
            self._messages.append({"role": USER, "content": text})
            (answer,) = self._generator.continued([self._prompt()], show)
            self._messages.append({"role": ASSISTANT, "content": answer.text})
            yield answer

    def _prompt(self) -> list[int]:
        try:
            text = self._renderer.prompt(self._messages)
        except ValueError as error:
            raise ConfigError(f"--chat: {error}") from error
        ((ids, _),) = self._tokenizer.encode_chat([text])
        return [*map(int, ids)]


def _log_probabilities(logits: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Return the log probability of each id [b, t], given logits [b, vocabulary] of t steps."""
    steps = zip(logits, ids.unbind(1), strict=True)
    return torch.cat([step.log_softmax(-1).gather(1, new[:, None]) for step, new in steps], 1)


class _Streamer(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Gives ``show`` pieces of a text as soon as their characters are complete.

    All tokens are decoded anew, as some tokenisers drop a blank at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, show: Show) -> None:
        self._tokenizer, self._show, self._shown = tokenizer, show, 0
        self._ids: list[int] | None = None  # None: before the prompt

    def put(self, value: Tensor) -> None:
        """Called by ``generate``, first with the prompt."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.tolist()
        if not (text := self._text()).endswith("\N{REPLACEMENT CHARACTER}"):
            self._give(text)

    def end(self) -> None:
        """Called by ``generate``."""
        self._give(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode([self._ids or []])[0]

    def _give(self, text: str) -> None:
        self._show(text[self._shown :])
        self._shown = len(text)
