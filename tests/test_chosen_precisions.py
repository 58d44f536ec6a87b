"""Runs in which the scheduler chooses precisions, with server, units and decoder link."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import run
from run_files import rounds_of
from test_fewer_bits import states

from client_app import payloads
from client_app import round as unit_round
from collapipe.errors import ConfigError
from collapipe.report import RoundingErrors
from collapipe.tensors import Tensors

SLOW = ("compression=auto", "channel.bandwidth_hz=[1e4,1e4]", "federation.rounds=4")
# An epoch is one step with the same rows in one micro-batch: all steps have equal length.
STEP = (
    "federation.local_steps=1",
    "data.max_train_samples=24",
    "batch_size=8",
    "pipeline.num_micro_batches=1",
)


def test_sent_bytes_match_the_chosen_precisions(tmp_path: Path) -> None:
    """Exactly, in each round."""
    run(tmp_path, *SLOW, *STEP)
    uplinks, sent = [state.uplink for state in states(tmp_path, *SLOW, *STEP)], set()
    for line in rounds_of(tmp_path):
        bits = 0.0
        for cluster in line["plan"]["clusters"]:
            names = cluster["uplink"]["activation"], cluster["uplink"]["upload"]
            payload = uplinks[cluster["unit"]].payload(*names, None)
            bits += payload.model_bits + payload.activation_bits
            sent.add(names)
        assert line["plan"]["clusters"]
        assert bits == 8 * line["bytes_up"]
        assert len(line["plan"]["error_queues"]) == 3
    assert len(sent) > 1
    assert sent > {("float32", "float32")} or ("float32", "float32") not in sent


@pytest.mark.thorough
def test_an_error_budget_too_small_for_rounding_gives_float32_weights(tmp_path: Path) -> None:
    """Bit for bit."""
    strategy = ("strategy=all", "federation.rounds=2")
    exact = run(tmp_path / "exact", *strategy)
    chosen = run(tmp_path / "auto", *strategy, "compression=auto", "strategy.error_budget=1e-12")
    assert all(torch.equal(chosen[name], exact[name]) for name in exact)


def test_an_exact_upload_leaves_no_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact upload includes the residual, which is not sent again."""
    compress, calls = unit_round.compress_update, list[tuple[str, bool]]()

    def seen(start: Tensors, end: Tensors, residual: Tensors, precision: str) -> Any:
        calls.append((precision, bool(residual)))
        return compress(start, end, residual, precision)

    monkeypatch.setattr(unit_round, "compress_update", seen)
    monkeypatch.setattr(payloads, "PRECISIONS", ("float32", "int8"))
    measured = list[bool]()

    def looked_at(*given: Any) -> RoundingErrors:
        measured.append(bool(given[4]))
        return RoundingErrors({}, {"int8": 2e-3})

    monkeypatch.setattr(unit_round, "measured", looked_at)
    upload = ("compression.upload=auto", "channel.bandwidth_hz=[1e4,1e4]", "federation.rounds=6")
    run(tmp_path, *upload, "federation.num_units=1", "strategy.drift_weight=0.2")
    following = list(itertools.pairwise(calls))
    residual_after = {before: has_residual for (before, _), (_, has_residual) in following}
    assert residual_after == {"int8": True, "float32": False}
    assert ("float32", True) in calls  # an exact upload included a residual
    assert measured == [
        has_residual for _, has_residual in calls
    ]  # errors are measured with the residual that is sent


@pytest.mark.parametrize("strategy", [("strategy=even",), ("strategy=dssra_paper",)])
def test_a_strategy_that_does_not_choose_precisions_is_refused(
    tmp_path: Path, strategy: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"compression\.activation"):
        run(tmp_path, "compression=auto", *strategy)
    assert not (tmp_path / "metrics.jsonl").exists() or not rounds_of(tmp_path)


def test_with_heads_on_control_units_only_the_upload_is_chosen(tmp_path: Path) -> None:
    run(tmp_path, *SLOW, *STEP, "decoder.mode=control_unit")
    sent = {
        (cluster["uplink"]["activation"], cluster["uplink"]["upload"])
        for line in rounds_of(tmp_path)
        for cluster in line["plan"]["clusters"]
    }
    assert {activation for activation, _ in sent} == {"float32"}
    assert {upload for _, upload in sent} - {"float32"}
