"""``python render.py``: render conversations by an untrusted chat template in a separate process.

A template is a program: it may loop, or build a text of gigabytes. The kernel ends this process at
its limits. The first line of standard input has the template and the limits, each further line
conversations: ``{"prompt": [messages, …]}`` or ``{"answers": [messages, …]}``. A line of standard
output answers each conversation, until one fails. All lines are JSON. This file imports nothing of
CollaPipe.
"""

import json
import os
import re
import resource
import signal
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from importlib.util import find_spec, module_from_spec
from typing import Any

_ASSISTANT = "assistant"
_MOST_TEXT, _MOST_ANSWERS, _MOST_ERROR = 2**21, 10_000, 400  # the first and the last: characters
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"strftime_now\(\s{0,9}(['\"])([^'\"\n]{0,200})\1\s{0,9}\)")

_Messages = Sequence[Mapping[str, str]]
_Text = tuple[str, list[tuple[int, int]]]


class _Template:
    def __init__(self, source: str, special_tokens: Mapping[str, str], day: str) -> None:
        self._given, self._tokens, self._day = source, special_tokens, date.fromisoformat(day)
        self._render = _imported()

    def prompt(self, messages: _Messages) -> _Text:
        return self._rendered(messages, add_generation_prompt=True)

    def answers(self, messages: _Messages) -> _Text:
        if _MARK.search(self._given):
            return self._rendered(messages, return_assistant_tokens_mask=True)
        if messages[0]["role"] == _ASSISTANT:
            raise ValueError("begins with the assistant; put a message of the user first")
        (text, _), places = self._rendered(messages), []
        for number, each in enumerate(messages):
            if each["role"] == _ASSISTANT:
                places.append(self._place(text, messages, number))
                if each["content"].split()[-1] not in text[slice(*places[-1])]:
                    raise ValueError(
                        f"message {number + 1} is not found in the text of the chat template; put "
                        "the answer between {% generation %} and {% endgeneration %} in a copy of "
                        "it, and set task.chat_template to that file"
                    )
        return text, places

    def _place(self, text: str, messages: _Messages, number: int) -> tuple[int, int]:
        """Return the place of a message in the ``text`` of all, or an empty one."""
        until, (prompt, _) = messages[:number], self.prompt(messages[:number])
        if not text.startswith(prompt) and not text.startswith(self._rendered(until)[0]):
            return 0, 0
        last = number + 1 == len(messages)
        through = text if last else self._rendered(messages[: number + 1])[0]
        start, answer = _common(text, prompt), through[_common(through, prompt) :]
        ends = (answer[n:] for n in range(len(answer)))
        return start, start + len(next((each for each in ends if text.startswith(each, start)), ""))

    def _rendered(self, messages: _Messages, **how: bool) -> _Text:
        named: dict[str, Any] = {**self._tokens, **how}
        try:
            (text,), found = self._render([[*messages]], chat_template=self._source, **named)
            text.encode()  # fails for a surrogate
        except MemoryError:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does without free memory
            raise
        except Exception as error:  # a template may raise anything
            cause = str(error)[:_MOST_ERROR] or type(error).__name__
            raise ValueError(
                f"the chat template refuses it ({cause}); correct the messages, or set another "
                "task.chat_template"
            ) from error
        places = [place for each in found for place in each]
        if len(text) > _MOST_TEXT or len(places) > _MOST_ANSWERS:
            raise ValueError(
                f"has {len(text):,} characters and {len(places):,} marked answers with the chat "
                f"template, at most {_MOST_TEXT:,} and {_MOST_ANSWERS:,} are possible; shorten it"
            )
        return text, places

    @cached_property
    def _source(self) -> str:
        return _NOW.sub(lambda found: repr(self._day.strftime(found[2])), self._given)


def _imported() -> Any:
    """Return ``render_jinja_template``; packages that it does not need here are not executed."""
    for name in ("transformers", "transformers.utils", "numpy"):
        if (spec := find_spec(name)) is not None:
            sys.modules[name] = module_from_spec(spec)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _common(text: str, beginning: str) -> int:
    """Return the number of first characters that both texts share."""
    if text.startswith(beginning):
        return len(beginning)
    lengths = range(1, len(beginning) + 1)
    return bisect_left(lengths, True, key=lambda n: not text.startswith(beginning[:n]))


def main() -> None:
    """Answer each line until standard input ends."""
    given = json.loads(sys.stdin.buffer.readline())
    if sys.platform == "linux":  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
    template, left = _Template(**given["template"]), given["cpu_s"]
    for line in sys.stdin.buffer:
        ((how, conversations),) = json.loads(line).items()
        method = template.prompt if how == "prompt" else template.answers
        for messages in conversations:
            # The signals of these limits end the process.
            left += given["cpu_s_each"] * len(messages)
            signal.setitimer(signal.ITIMER_PROF, left)
            signal.setitimer(signal.ITIMER_REAL, given["wall_s"])
            try:
                found: _Text | str = method(messages)
            except ValueError as error:
                found = str(error)
            left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(found), flush=True)
            if isinstance(found, str):
                break


if __name__ == "__main__":
    main()
