"""Any number of units in one process encode their rows only once."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import Context

from client_app import control_unit, node
from collapipe.wire import records
from collapipe.wire.messages import Setup


def test_each_unit_reads_its_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, read = Mock(**{"federation.num_units": 150}), list[int]()

    def made(settings: Any, unit: int, tokenizer: Any) -> Any:
        read.append(unit)
        return SimpleNamespace(number=unit)

    monkeypatch.setattr(node, "ControlUnit", made)
    monkeypatch.setattr(node, "Tokenizer", SimpleNamespace(unpack=lambda text: text))
    node.cached_units.cache_clear()
    units = [
        Context(1, unit, {}, records.pack(Setup("{}", "{}", {}, unit)), {}) for unit in range(150)
    ]
    found = [[node.unit_of(each, settings).number for each in units] for _ in range(3)]
    node.cached_units.cache_clear()
    assert found == [[*range(150)]] * 3
    assert read == [*range(150)]


def test_a_unit_reads_its_evaluation_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(control_unit, "load_shard", lambda *of: ())
    monkeypatch.setattr(control_unit, "load_held_out", lambda *of: read.append(of[2]))
    settings = Mock(
        **{
            "pipeline.dtype": "float32",
            "task.encode.return_value.lengths": (),
            "batch_size": 0,
            "seed": 1,
            "compression.feedback": False,
        }
    )
    unit = control_unit.ControlUnit(settings, 0, Mock())
    for _ in range(3):
        assert unit.evaluate("validation", {}, {}) is unit.evaluate("test", {}, {}) is None
    assert read == ["validation", "test"]
