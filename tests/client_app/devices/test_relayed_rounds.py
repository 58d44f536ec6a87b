"""A unit remembers that a device cannot dial another one, also after a round that failed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from device_cluster import plan_of
from federated import TINY

from client_app.control_unit import ControlUnit
from client_app.trainers import Start, open_trainer
from collapipe.config import load_overrides
from collapipe.errors import RoundFailedError
from collapipe.models.frozen import FrozenParts
from collapipe.models.split import SplitModel
from collapipe.runs.rows import build_tokenizer
from collapipe.wire.messages import TrainRequest
from pipeline.devices.control_unit.segments import RemoteSegments


def test_later_rounds_are_relayed_though_this_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of them would wait for the same device to be dialled."""

    def fails(segments: RemoteSegments) -> None:
        segments._cluster = replace(segments._cluster, relay=True)
        raise RoundFailedError("the remaining devices hold too little")

    box = {"name": "pi", "flops_per_s": 1e9, "d2d_rate_bps": 1e9, "address": "127.0.0.1:1"}
    clusters = [{"name": "home", "devices": [box]}]
    tree = {"batch_size": 6, "model": {"name": "transformer"}, "clusters": clusters}
    (file := tmp_path / "boxes.yaml").write_text(json.dumps(tree))  # JSON is also YAML
    own = "cluster=devices", f"cluster.file={file}", "federation.num_units=1"
    settings = load_overrides([*TINY, *own])
    unit = ControlUnit(settings, 0, build_tokenizer(settings))
    weights = SplitModel(settings.model, unit.vocabulary).state_dict()
    fixed = FrozenParts({}, settings.model, unit.vocabulary, unit.dtype, stores=[])
    start = Start(weights, fixed, {}, stem_limit_bytes=0, coder=None, meter=None)
    monkeypatch.setattr(RemoteSegments, "__enter__", fails)
    request = TrainRequest(1, plan_of(["pi"], [4], 2), timeout_s=9.0, link=None)
    assert unit.devices is not None and not unit.devices.relay
    with pytest.raises(RoundFailedError), open_trainer(unit, request, start):
        pass
    assert unit.devices.relay
