"""Conversations become batches; targets are the assistant's tokens, and packing is lossless."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chats import ALTERNATING, MARKED, PLAIN, messages, rows, template, tokenizer
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trained import scored

from collapipe.errors import ConfigError, DataError
from collapipe.statistics import Statistics
from collapipe.tasks import chat as task_chat
from collapipe.tasks.causal_lm import correct_tokens
from collapipe.tasks.chat import Chat, pack
from collapipe.tensors import IGNORED, MOST_PACKED, Batch
from collapipe.text import chat_template
from collapipe.text.chat_template import Renderer
from collapipe.text.tokenizer import Tokenizer

TALKS = [
    messages("One?", "It is 1.", "Two?", "It is 2."),
    messages("Be short.", "A?", "b", roles=("system", "user", "assistant")),
    messages("C?", "d"),
]


def chat(max_length: int = 400, packing: bool = True, file: str | None = None) -> Chat:
    return Chat(300, max_length, file, packing)


def answers_of(batch: Batch, known: Tokenizer) -> list[str]:
    """The targets of each row as text."""
    return known.decode([row[row != IGNORED].tolist() for row in batch.targets])


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_targets_are_the_assistants_tokens(source: str) -> None:
    known = tokenizer(source)
    examples = chat(packing=False).encode(rows(TALKS), known)
    batch = examples.batch([0, 1, 2])
    assert answers_of(batch, known) == ["It is 1.<|end|>It is 2.<|end|>", "b<|end|>", "d<|end|>"]
    assert batch.mask.dtype == torch.bool
    assert batch.mask.sum(1).tolist() == examples.lengths
    for inputs, mask, targets in zip(batch.inputs, batch.mask, batch.targets, strict=True):
        following = inputs[mask][1:]
        trained = targets[: len(following)] != IGNORED
        assert torch.equal(targets[: len(following)][trained], following[trained])


def test_packed_rows_contain_every_conversation_once() -> None:
    known = tokenizer()
    apart = chat(packing=False).encode(rows(TALKS), known)
    room = sum(apart.lengths[1:])
    examples = chat(max_length=max(room, apart.lengths[0])).encode(rows(TALKS), known)
    assert sorted(examples.lengths) == sorted([apart.lengths[0], room])
    packed = examples.batch([examples.lengths.index(room)])
    assert packed.mask.dtype == torch.uint8
    assert packed.mask[0].bincount().tolist()[1:] == apart.lengths[1:]
    for number, row in ((1, 1), (2, 2)):
        alone, own = apart.batch([row]), packed.mask == number
        assert torch.equal(packed.inputs[own], alone.inputs[0])
        assert torch.equal(packed.targets[own], alone.targets[0])
    assert chat().encode_apart(rows(TALKS), known).lengths == apart.lengths


@given(st.lists(st.integers(1, 10), max_size=40))
def test_packed_rows_are_no_longer_than_the_limit(sizes: list[int]) -> None:
    packed = pack(sizes, 10)
    assert sorted(item for row in packed for item in row) == [*range(len(sizes))]
    assert all(sum(sizes[item] for item in row) <= 10 for row in packed)
    least = math.ceil(sum(sizes) / 10)
    assert least <= len(packed) <= max(least, 2 * least - 1)  # any-fit packing: half full or more


def test_a_row_has_no_more_conversations_than_a_byte_can_number() -> None:
    assert [len(row) for row in pack([1] * 600, 1000)] == [MOST_PACKED, MOST_PACKED, 90]


def test_long_conversations_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A conversation whose answers are all cut off is left out."""
    known, long = tokenizer(), messages("x" * 200, "y")
    with caplog.at_level(logging.WARNING):
        examples = chat(max_length=70).encode(rows([*TALKS, long]), known)
    assert max(examples.lengths) == 70
    assert "2 of 4 conversations are longer than task.max_length=70" in caplog.text
    assert "1 of 4 conversations have no answer" in caplog.text
    with pytest.raises(
        DataError, match=r"all 1 conversations lack an answer .* task\.max_length=70"
    ):
        chat(max_length=70).encode(rows([long]), known)


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    talks = [TALKS[0], messages("One?", "x", "y", roles=("user", "assistant", "assistant"))]
    with pytest.raises(DataError, match=r"chats\.jsonl: row 2: .*roles must alternate") as raised:
        chat().encode(rows(talks), tokenizer(ALTERNATING))
    assert "\n" not in str(raised.value)


def test_a_template_that_loops_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process can encode other conversations afterwards."""
    monkeypatch.setattr(chat_template, "_CPU_S", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"row 1: .*0\.3 s of processor time") as raised:
        chat().encode(rows(TALKS), tokenizer(loop + PLAIN))
    assert raised.value.public_message == "the chat template refuses one of its conversations"
    with pytest.raises(ConfigError, match=r"'Hello\.': .*0\.3 s of processor time"):
        chat().with_template(tokenizer(loop + PLAIN))
    assert chat().encode(rows(TALKS), tokenizer()).lengths


def test_encoding_in_parts_equals_encoding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process renders all parts."""
    started = []
    monkeypatch.setattr(task_chat, "Renderer", lambda own: started.append(own) or Renderer(own))
    long = [*TALKS, messages("e?", "f" * 500)] * 5
    whole = chat(60, packing=False).encode(rows(long), tokenizer())
    monkeypatch.setattr(task_chat, "_RENDERED", 3)
    monkeypatch.setattr(task_chat, "_ENCODED", 50)
    parts = chat(60, packing=False).encode(rows(long), tokenizer())
    assert len(started) == 2
    assert parts.lengths == whole.lengths
    for found, expected in zip(
        (parts.stream, parts.targets), (whole.stream, whole.targets), strict=True
    ):
        assert found.tolist() == expected.tolist()


def test_spans_of_answers_may_overlap_and_be_empty() -> None:
    texts = [("abcdef", [(4, 5), (0, 2), (1, 1), (1, 2)]), ("ab", [])]
    found = [answers.tolist() for _, answers in task_chat._encoded(texts, tokenizer())]
    assert found == [[True, True, False, False, True, False], [False, False]]


def test_typed_texts_are_messages_of_the_user() -> None:
    known, task = tokenizer(), chat(max_length=24)
    examples = task.inputs(["A?", "x" * 30], known)
    batch = examples.batch([0, 1])
    inputs = [row[mask].tolist() for row, mask in zip(batch.inputs, batch.mask, strict=True)]
    texts = known.decode(inputs)
    assert texts == ["<|user|>A?<|end|><|assistant|>"[-24:], "xxxx<|end|><|assistant|>"]
    assert examples.lengths == [24, 24]


def test_the_texts_for_a_tokeniser_are_those_of_all_messages() -> None:
    assert [*map(list, chat().texts(rows(TALKS[2:])))] == [["C?", "d"]]


def test_a_file_replaces_the_tokenisers_template(tmp_path: Path) -> None:
    (file := tmp_path / "own.jinja").write_text(MARKED + "{{ eos_token }}")
    found = chat(file=str(file)).with_template(Tokenizer.of_bytes()).chat_template
    assert found is not None
    assert (found.source, found.special_tokens["eos_token"]) == (file.read_text(), "</s>")
    own = template(PLAIN, bos_token="<bos>")
    given = replace(Tokenizer.of_bytes(), chat_template=own)
    replaced = chat(file=str(file)).with_template(given).chat_template
    assert replaced is not None
    assert replaced.special_tokens == {"bos_token": "<bos>"}
    assert chat().with_template(given).chat_template == given.chat_template


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "cannot be used"),
        (b"\xff", "cannot be used"),
        (b"{}", "names messages"),
        (b"{{ messages", "refuses it"),
    ],
)
def test_a_file_without_a_valid_template_is_refused(
    tmp_path: Path, content: bytes | None, cause: str
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=cause):
        chat(file=str(file)).with_template(Tokenizer.of_bytes())


def test_a_tokeniser_without_a_template_is_refused() -> None:
    for use in (
        lambda: chat().with_template(Tokenizer.of_bytes()),
        lambda: chat().encode(rows(TALKS), Tokenizer.of_bytes()),
        lambda: chat().inputs(["A?"], Tokenizer.of_bytes()),
    ):
        with pytest.raises(ConfigError, match=r"no chat template; set task\.chat_template"):
            use()


def test_a_source_of_rows_is_required() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_file"):
        chat().splits(0)


def test_correct_tokens_are_counted_only_at_targets() -> None:
    targets = torch.tensor([[IGNORED, 4, 5, IGNORED], [7, IGNORED, IGNORED, IGNORED]])
    assert correct_tokens([[4, 4, 9, 1, 1], [7]], targets) == 2
    assert correct_tokens([[4], [9]], targets) == 0


def test_token_accuracy_is_a_share_of_the_targets() -> None:
    table = Dataset.from_dict({"messages": [[]]})
    score = scored(chat(), [], table, math.log(17))
    assert score.value == pytest.approx(17)
    assert score.extra_metrics == {"token accuracy": 0.0}
    counted = Statistics(1, 8, (1.0,), torch.tensor([6]).numpy())
    assert chat().score(counted).extra_metrics == {"token accuracy": 0.75}
    assert chat().possible(counted, ())
    assert not chat().possible(Statistics(1, 5, (1.0,), torch.tensor([6]).numpy()), ())
