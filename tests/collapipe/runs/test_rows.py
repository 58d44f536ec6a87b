"""The run's tokeniser is made of the units' words, of each unit only so many."""

from collections.abc import Mapping

import pytest

from collapipe.config import load_overrides
from collapipe.runs import rows
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import RowsReply


def test_a_unit_that_reports_very_many_words_does_not_delay_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = dict[str, int]()

    def trained(counts: Mapping[str, int], _: int) -> Tokenizer:
        counted.update(counts)
        return Tokenizer.of_bytes()

    of_bytes = Tokenizer.of_bytes()
    monkeypatch.setattr(Tokenizer, "of_bytes", lambda: of_bytes)
    monkeypatch.setattr(Tokenizer, "train_from_counts", trained)
    reports = [
        RowsReply(0, 9, {}, {"rare": 1, "often": 2**26}),
        RowsReply(1, 9, {}, {"rare": 3, "own": 5}),
    ]
    rows.make_tokenizer(load_overrides([]), reports)
    assert counted == {"rare": 4, "own": 5, "often": pytest.approx(2**22, abs=2)}
