"""A model's chat template: conversations as text, and the places of the assistant's answers.

A template is a program in Jinja that comes with a model, often from the hub. Only the sandbox of
transformers executes it, in a process with limits.
"""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, cast

from collapipe.errors import ConfigError, printable

ASSISTANT, USER = "assistant", "user"
_MOST_SOURCE = 2**17  # characters of a template with its special tokens
_PROGRAM = Path(__file__).with_name("render.py")
_CPU_S, _CPU_S_EACH, _WALL_S = 60, 0.02, 600  # in all, for each message, for each conversation
_MEMORY = 10**9  # bytes of addresses

Message = Mapping[str, str]
"""A message's ``role`` and ``content``."""
Answers = list[tuple[int, int]]
"""First character of each answer of the assistant, and the first one after it."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template. Raises ``ConfigError`` for another content."""

    source: str  # the program in Jinja
    special_tokens: Mapping[str, str]  # that the program may use, such as ``bos_token``
    day: str  # the program's "now" (ISO 8601), so that a resumed run has the same texts

    def __post_init__(self) -> None:
        tokens = self.special_tokens
        texts = [self.source, *(chain(*tokens.items()) if isinstance(tokens, dict) else [None])]
        valid = all(isinstance(each, str) for each in texts) and "messages" in self.source
        if not valid or sum(map(len, texts)) > _MOST_SOURCE:
            raise ConfigError(
                "not a chat template: a text that names messages, and special tokens, together of "
                f"at most {_MOST_SOURCE:,} characters"
            )
        date.fromisoformat(self.day)


class Renderer:
    """Renders conversations by a template, in a process that exists as long as this object.

    The process has limits of time and memory (memory: on Linux alone). Raises
    ``ModuleNotFoundError`` without transformers or Jinja.
    """

    def __init__(self, template: ChatTemplate) -> None:
        for library in ("transformers", "jinja2"):
            if find_spec(library) is None:
                raise ModuleNotFoundError(f"no {library}", name=library)
        self._process = subprocess.Popen(  # noqa: S603, our own program
            [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        weakref.finalize(self, _end, self._process)
        limits = {"cpu_s": _CPU_S, "cpu_s_each": _CPU_S_EACH, "wall_s": _WALL_S, "memory": _MEMORY}
        self._unsent = json.dumps({"template": asdict(template), **limits}) + "\n"

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text after which the assistant's next answer begins. Raises ``ValueError`` if
        the template fails or exceeds a limit."""
        ((text, _),) = self._ask("prompt", [messages])
        return text

    def answers(self, conversations: Sequence[Sequence[Message]]) -> Iterator[tuple[str, Answers]]:
        """Yield each conversation as text, and the places of the assistant's answers with the marks
        that end them.

        A template with ``{% generation %}`` marks them itself. Otherwise the template renders the
        messages before an answer, with and without it, and the texts are compared. Earlier turns
        may lack what the last one has, such as empty reasoning. Raises ``ValueError`` if the
        template fails or exceeds a limit, or an answer is not found.
        """
        return self._ask("answers", conversations)

    def _ask(
        self, how: str, conversations: Sequence[Sequence[Message]]
    ) -> Iterator[tuple[str, Answers]]:
        stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        with suppress(BrokenPipeError):  # it has ended, and stdout has no further line
            stdin.write(f"{self._unsent}{json.dumps({how: conversations})}\n".encode())
            stdin.flush()
        self._unsent = ""
        for _ in conversations:
            line = stdout.readline()
            found = json.loads(line) if line.endswith(b"\n") else _cause(self._process.wait())
            if isinstance(found, str):
                raise ValueError(printable(found))
            text, places = found
            yield text, [(first, after) for first, after in places]


def _cause(status: int) -> str:
    """Return why the process ended with ``status``."""
    taken = {
        -signal.SIGPROF: f"{_CPU_S:g} s of processor time and {_CPU_S_EACH:g} s for each message",
        -signal.SIGALRM: f"{_WALL_S:g} s for a conversation",
        -signal.SIGKILL: f"{_MEMORY / 1e9:g} GB of memory, or than is free",
    }
    cause = f"the process of the chat template ends with status {status}"
    if status in taken:
        cause = f"the chat template takes more than {taken[status]}"
    return f"{cause}; set another task.chat_template, or split the conversation"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
