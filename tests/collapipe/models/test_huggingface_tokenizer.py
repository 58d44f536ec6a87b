"""A foreign tokeniser is read; code next to it does not run, and the user gets no prompt."""

import builtins
import json
import re
from pathlib import Path

import pytest
import torch

from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.runs.rows import make_tokenizer
from collapipe.text.tokenizer import Tokenizer

WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nred\nblue\n"
MAPPED = {"auto_map": {"AutoFeatureExtractor": "evil.Evil", "AutoProcessor": "evil.Evil"}}


def build(folder: Path) -> Tokenizer:
    """Build the tokeniser as a run with ``data.tokenizer=folder`` does."""
    return make_tokenizer(load_overrides([f"data.tokenizer={folder}"]), [])


def refused(folder: Path) -> str:
    """Return the one-line error for the folder."""
    with pytest.raises(ConfigError, match=rf"^data\.tokenizer={folder}: ") as caught:
        build(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, **files: object) -> None:
    """``name=tree`` becomes ``name.json``."""
    for name, tree in files.items():
        (folder / f"{name}.json").write_text(json.dumps(tree))


@pytest.fixture(autouse=True)
def _no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", lambda *text: pytest.fail(f"asked: {text}"))


@pytest.mark.parametrize("place", ["tokenizer_config", "config"])
@pytest.mark.parametrize(
    "named",
    [
        "AutoFeatureExtractor",
        "AutoFeatureExtractorFast",
        "AutoProcessor",
        "AutoTokenizer",
        "BertModel",
        "BertModelFast",
        "pipeline",
    ],
)
def test_a_class_other_than_a_tokeniser_is_refused_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, place: str
) -> None:
    """The code that the folder names does not run, and its pickled weights are not read."""
    monkeypatch.setattr(torch, "load", lambda *rest, **more: pytest.fail("unpickled"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "vocab.txt").write_text(WORDS)
    (tmp_path / "pytorch_model.bin").touch()
    trees = {"tokenizer_config": {}, "config": {"model_type": "t5", **MAPPED}}
    write(tmp_path, **trees, preprocessor_config=MAPPED)
    write(tmp_path, **{place: {**trees[place], "tokenizer_class": named}})
    assert f"its tokenizer_class '{named}' is no tokeniser" in refused(tmp_path)
    assert not (tmp_path / "trace").exists()


def test_code_in_the_folder_of_a_tokeniser_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    write(tmp_path, tokenizer_config={"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}})
    refused(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("named", [None, "BertTokenizer", "BertTokenizerFast"])
def test_a_vocabulary_alone_is_enough(tmp_path: Path, named: str | None) -> None:
    """Without a named class it is read as BERT's vocabulary."""
    (tmp_path / "vocab.txt").write_text(WORDS)
    if named:
        write(tmp_path, tokenizer_config={"tokenizer_class": named}, config={"model_type": "bert"})
    assert build(tmp_path).encode(["red blue"]) == [[5, 6]]


def test_a_folder_without_a_vocabulary_has_no_tokeniser(tmp_path: Path) -> None:
    """BERT's own class would build a tokeniser of its five special tokens."""
    assert re.search("cannot be read .*; write a tokeniser there", refused(tmp_path))
