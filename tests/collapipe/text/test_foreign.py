"""A foreign tokeniser works or is refused with an error of one line."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from trained import of_texts

from collapipe.errors import ConfigError
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, check_tokenizer

Change = Callable[[dict[str, Any]], Any]


def changed(change: Change) -> str:
    tree = json.loads(of_texts(["a hen", "an owl"], 300).json_text)
    change(tree)
    return json.dumps(tree)


def charsmap(value: str) -> Change:
    return lambda tree: tree.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": value}
    )


def replace(**rule: Any) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "x"}, "content": "xx", **rule}


def sequence(count: int) -> Change:
    rules = [replace() for _ in range(count)]
    return lambda tree: tree.update(normalizer={"type": "Sequence", "normalizers": rules})


def words(tree: dict[str, Any]) -> None:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "hen": 3}
    tree.update(model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"})


BROKEN = {
    "map": charsmap("AAAA"),
    "long map": charsmap("/////wAA" * 40),
    "doubles": sequence(40),
    "grows": sequence(12),
    "without its unknown token": words,
    "no model": lambda tree: tree.pop("model"),
    "another type": lambda tree: tree.update(model=7),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tokeniser_gives_an_error_of_one_line(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokeniser fails, takes all memory or never ends."""
    if kind == "doubles":
        monkeypatch.setattr("collapipe.text.tokenizer._SECONDS", 1)
    with pytest.raises(ConfigError) as caught:
        check_tokenizer(changed(BROKEN[kind]))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


PACKED = [
    '{"tokenizer": 7, "marks": {}, "labels": []}',
    '{"tokenizer": "", "marks": {"pad": [[]]}, "labels": []}',
    '{"tokenizer": "", "marks": {}, "labels": [[]]}',
]


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, *PACKED])
@pytest.mark.parametrize("how", [(), ("packed",)])
def test_text_that_is_not_a_tokeniser_is_refused(text: str, how: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        check_tokenizer(text, *how)


def test_a_valid_packed_tokeniser_passes() -> None:
    check_tokenizer(dataclasses.replace(Tokenizer.of_bytes(), labels=["hen"]).pack(), "packed")


def test_a_valid_tokeniser_passes() -> None:
    check_tokenizer(changed(lambda tree: tree.update(normalizer={"type": "NFKD"})))


def test_a_word_without_a_token_gives_an_error_of_one_line() -> None:
    with pytest.raises(ConfigError, match="UNK") as caught:
        Tokenizer(changed(words), SpecialTokens()).encode(["owl"])
    assert "\n" not in str(caught.value)


def test_token_ids_may_have_gaps() -> None:
    def gap(tree: dict[str, Any]) -> None:
        vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "hen": 9, "[UNK]": 4}
        tree.update(model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"})

    assert Tokenizer(changed(gap)).vocabulary.size == 10
