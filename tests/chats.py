"""Chat templates that resemble the templates of known models, and conversations."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from collapipe.data.sources import standard
from collapipe.text.chat_template import ChatTemplate, Message
from collapipe.text.tokenizer import Tokenizer

MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Only the last answer has a reasoning section, which is empty.
REASONING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The generation prompt opens a reasoning section; answers in the text have none.
UNREASONED = PLAIN.replace("'<|assistant|>' }}", "'<|assistant|><think>' }}")
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
)
NAMES = ("messages", "prompt", "completion")
COLUMNS = {name: name for name in NAMES}


def messages(*contents: str, roles: Sequence[str] = ("user", "assistant")) -> list[Message]:
    """Return messages whose roles repeat ``roles``."""
    return [
        {"role": roles[n % len(roles)], "content": content} for n, content in enumerate(contents)
    ]


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens, "2033-05-03")


def tokenizer(source: str = PLAIN) -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    return replace(Tokenizer.of_bytes(), chat_template=template(source))


def rows(conversations: Sequence[Sequence[Message]], where: str = "chats.jsonl") -> Dataset:
    """Return the conversations as a run reads them."""
    table = {"messages": [[*map(dict, each)] for each in conversations]}
    return standard(Dataset.from_dict(table), COLUMNS, where)


def write(file: Path, objects: Sequence[object]) -> Path:
    """Write the objects as JSON lines."""
    file.write_text("\n".join(json.dumps(each) for each in objects) + "\n")
    return file
