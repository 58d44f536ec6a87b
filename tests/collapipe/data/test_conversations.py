"""Reading conversations from columns of messages, or of prompts and completions."""

from pathlib import Path
from typing import Any

import pytest
from chats import COLUMNS, messages, write
from datasets import Dataset

from collapipe.data.conversations import PLACE
from collapipe.data.files import read_file
from collapipe.data.sources import standard
from collapipe.errors import DataError

TALK = messages("One?", "It is 1.")


def read(file: Path, **names: str) -> Dataset:
    names = {**COLUMNS, **names}
    return standard(read_file(file, "data.train_file", names.values()), names, str(file))


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"messages": TALK}, {}),
        ({"messages": [{**each, "weight": 1} for each in TALK]}, {}),
        ({"talk": TALK, "prompt": "x", "completion": "y"}, {"messages": "talk"}),
        ({"prompt": "One?", "completion": "It is 1."}, {}),
        (
            {"question": "One?", "answer": "It is 1."},
            {"prompt": "question", "completion": "answer"},
        ),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}),
        ({"prompt": TALK[:1], "completion": "It is 1."}, {}),
    ],
)
def test_each_form_of_a_conversation_is_read(
    tmp_path: Path, row: dict[str, Any], names: dict[str, str]
) -> None:
    """Other keys of a message are dropped; other columns are kept."""
    file = write(tmp_path / "rows.jsonl", [row | {"owner": "a"}] * 2)
    found = read(file, **names)
    assert found["messages"][:] == [TALK, TALK]
    assert found[PLACE][:] == [f"{file}: row 1", f"{file}: row 2"]
    assert found["owner"][:] == ["a", "a"]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"messages": TALK * 501}, r"row 2: has 1002 messages, at most 1000"),
        ({"messages": messages("One?")}, r"row 2 has no message of the role 'assistant'"),
        ({"messages": []}, r"row 2 has no message of the role 'assistant'"),
        ({"messages": None}, r"row 2, column 'messages': holds None, not a list"),
        ({"messages": messages("One?", " ")}, r"message 2 has no text as its content"),
        ({"messages": [*TALK, {"role": "user"}]}, r"message 3 has no text as its content"),
        ({"messages": [{"role": None, "content": "x"}]}, r"message 1 has no text as its role"),
    ],
)
def test_an_invalid_conversation_is_reported_with_file_and_cause(
    tmp_path: Path, row: dict[str, Any], cause: str
) -> None:
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}, row])
    with pytest.raises(DataError, match=cause) as raised:
        read(file)
    assert str(file) in str(raised.value)
    assert "One" not in raised.value.public_message


def test_a_text_in_the_messages_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds 'One\?', not a list of messages"):
        read(write(tmp_path / "rows.jsonl", [{"messages": "One?"}]))


def test_the_columns_of_a_file_without_conversations_are_listed(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "One?", "text": "x"}])
    with pytest.raises(DataError, match=r"'messages'.*'prompt', 'text'.*data\.messages_column"):
        read(file)
