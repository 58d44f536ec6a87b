"""Read conversations: a column of messages, or a prompt and its completion."""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from collapipe.errors import DataError
from collapipe.text.chat_template import ASSISTANT, USER, Message

MESSAGES, PLACE = "messages", "place_of_conversation"
_PAIR = "prompt", "completion"
_MOST_MESSAGES = 1000  # a template renders all messages before each answer


def read_conversations(flat: Dataset, names: Mapping[str, str], where: str) -> Dataset:
    """Return rows with ``messages``, a list of ``role`` and ``content``, and their places for
    errors.

    The column ``names["messages"]`` has messages. Rows without it have a prompt and a completion,
    each a text or messages. Raises ``DataError``, which names ``where``, column and row (from 1).
    """
    whole, pair = names[MESSAGES], [names[column] for column in _PAIR]
    there = flat.column_names
    if whole in there:
        columns, roles = [whole], [""]
    elif not {*pair} - {*there}:
        columns, roles = pair, [USER, ASSISTANT]
    else:
        raise DataError(
            f"{where}: there is no column {whole!r}, and not both {pair[0]!r} and {pair[1]!r}, but "
            f"{', '.join(map(repr, there))}; set data.messages_column, or data.prompt_column and "
            "data.completion_column for the run",
            "its rows have no column of messages, or of prompts and completions",
        )
    found = list[list[Message]]()
    places = [f"{where}: row {number}" for number in range(1, len(flat) + 1)]
    for place, *cells in zip(places, *(flat[name][:] for name in columns), strict=True):
        row = list[Message]()
        for name, role, cell in zip(columns, roles, cells, strict=True):
            row += _messages(cell, role, f"{place}, column {name!r}")
        if len(row) > _MOST_MESSAGES:
            raise _refusal(f"{place}: has {len(row)} messages, at most {_MOST_MESSAGES}; split it")
        if ASSISTANT not in [each["role"] for each in row]:
            raise _refusal(f"{place} has no message of the role {ASSISTANT!r}; leave it out")
        found.append(row)
    return Dataset.from_dict({MESSAGES: found, PLACE: places})


def _messages(cell: Any, role: str, where: str) -> list[Message]:
    """Return a cell's messages; a text is one message of ``role``, if that is not empty."""
    if role and isinstance(cell, str):
        cell = [{"role": role, "content": cell}]
    if not isinstance(cell, list):
        raise _refusal(
            f"{where}: holds {cell!r:.40}, not a list of messages; write objects with role and "
            "content"
        )
    for number, each in enumerate(cell, 1):
        for key in ("role", "content"):
            value = each.get(key) if isinstance(each, dict) else None
            if not isinstance(value, str) or not value.strip():
                raise _refusal(
                    f"{where}: message {number} has no text as its {key}; fill it in, or leave the "
                    "row out"
                )
    return [{"role": each["role"], "content": each["content"]} for each in cell]


def _refusal(message: str) -> DataError:
    return DataError(message, "one of its conversations cannot be used")
