"""Label names of any script are accepted; errors of unprintable names state the row."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from collapipe.data.folders import Lines, parse_labelled, parse_tagged
from collapipe.data.sources import standard
from collapipe.errors import ConfigError, DataError, is_printable
from collapipe.tasks.classification import Classification
from collapipe.tasks.text_task import check_labels
from collapipe.text.tokenizer import LONGEST_WORD, count_words
from collapipe.wire import records
from collapipe.wire.messages import RowsReply

_PERSIAN, _FAMILY = "می\u200cخواهم", "👨\u200d👩\u200d👧"
_GOOD = [_PERSIAN, _FAMILY, "e\u0301te", "हिन्दी", "全角\u3000空白", "\U0001fae8"]
_SIZES: dict[str, Any] = {"root": None, "synthetic": False, "vocabulary": 300, "max_length": 8}
_BAD = ["a\x1b[2J", "a\ud800", "a\u2028b", "a\u202eb", "x" * 252]


@pytest.mark.parametrize("name", _GOOD)
def test_labels_of_any_script_reach_the_server(name: str) -> None:
    rows = standard(Dataset.from_dict({"text": ["a"], "label": [name]}), _columns("label"), "f.csv")
    labels = Classification(**_SIZES).label_counts(rows)
    assert labels == {name: 1}
    reply = RowsReply(0, 1, labels, {}, name)
    assert records.unpack(RowsReply, records.pack(reply)) == reply


# Arrow cannot store a lone surrogate.
@pytest.mark.parametrize("name", [each for each in _BAD if "\ud800" not in each])
def test_a_bad_label_is_named_with_its_file_and_row(name: str) -> None:
    with pytest.raises(DataError, match=r"f\.csv: column 'label', row 2: label .*1 to 200|control"):
        standard(Dataset.from_dict({"label": ["a", name]}), {"label": "label"}, "f.csv")
    tags = Dataset.from_dict({"tokens": [["b"]], "tags": [[f"B-{name}"]]})
    with pytest.raises(DataError, match=r"f\.csv: row 1: (label|tag) "):
        standard(tags, {"tokens": "tokens", "tags": "tags"}, "f.csv")


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_label_is_named_with_its_file_and_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(f"a\n\n{name}\n".encode(errors="replace"))
    if "\ud800" not in name:  # a file cannot contain it
        with pytest.raises(DataError, match=r"labels\.txt:3: label"):
            parse_labelled(Lines(tmp_path / "train.tsv", ["text\t0"]))
    with pytest.raises(DataError, match=r"train\.conll:2: (label|tag)"):
        parse_tagged(Lines(Path("train.conll"), ["a O", f"b B-{name}"]))
    with pytest.raises(ConfigError, match=r"task\.labels: label"):
        Classification(**_SIZES, labels=("a", name))
    assert len(name) > 200 or not is_printable(name)


def test_a_column_with_more_than_10000_labels_is_refused() -> None:
    with pytest.raises(DataError, match="10,001 different labels, at most 10,000"):
        check_labels([*map(str, range(10_001))], None)


def test_a_word_that_is_too_long_to_report_is_left_out() -> None:
    assert count_words([["a", "b" * (LONGEST_WORD + 1)]]) == {"a": 1}


def _columns(*names: str) -> dict[str, str]:
    return {name: name for name in ("text", *names)}
