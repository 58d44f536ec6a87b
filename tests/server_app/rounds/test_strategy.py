"""The strategy as Flower's users start theirs: from a ServerApp of three lines."""

import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federated import grid_of, run, settings_of
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import Result

from collapipe.wire import records
from server_app.rounds.strategy import CollaPipeStrategy

ROOT = Path(__file__).parents[3]


def test_the_documented_server_app_trains_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(tmp_path / "run", "federation.rounds=3")
    page = (ROOT / "docs/extend.md").read_text().partition("## A Flower app of your own")[2]
    example = dict[str, Any]()
    exec(page.split("```")[1].removeprefix("python"), example)
    results, start = list[Result](), CollaPipeStrategy.start
    monkeypatch.setattr(
        CollaPipeStrategy, "start", lambda *args, **named: results.append(start(*args, **named))
    )
    settings, overrides = settings_of(tmp_path / "plain", ["federation.rounds=3"])
    context = Context(1, 1, {}, RecordDict(), {"overrides": shlex.join(overrides)})
    example["app"](grid_of(settings, overrides, None), context)
    found = records.unpack_tensors(results[0].arrays)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert list(results[0].train_metrics_clientapp) == [1, 2, 3]
    assert not (tmp_path / "plain").exists()


def test_the_model_is_packed_and_unpacked_once_a_round(tmp_path: Path) -> None:
    """Units' replies aside: packed at the start and for the messages of the next round."""
    unpacked, packed = [0], [0]
    unpack, pack = records.unpack_tensors, records.pack_tensors

    def count_unpack(record: ArrayRecord) -> dict[str, torch.Tensor]:
        unpacked[0] += any(name.startswith("head.") for name in record)
        return unpack(record)

    def count_pack(tensors: dict[str, torch.Tensor]) -> ArrayRecord:
        packed[0] += any(name.startswith("head.") for name in tensors)
        return pack(tensors)

    counting = patch.multiple(records, unpack_tensors=count_unpack, pack_tensors=count_pack)
    with counting:
        run(tmp_path, "federation.rounds=4", "federation.eval_every=1")
    assert (packed, unpacked) == ([5], [0])
