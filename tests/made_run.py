"""Synthetic run folders, drawn from a seed without training: with failures, excluded units, a
skipped round, and an evaluation every tenth round."""

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from collapipe.plan import Certificate, ClusterPlan, RoundPlan, SegmentPlan, Span, UplinkPlan
from collapipe.report import ClusterCost, RoundCost, RoundReport
from collapipe.state import Estimates

CONFIG = """\
# CollaPipe 9.8.7
seed: {seed}
batch_size: 64
model:
  _target_: collapipe.models.transformer.TransformerSpec
  num_blocks: 6
cluster:
  _target_: collapipe.presets.SyntheticCluster
  num_devices: 3
channel:
  _target_: collapipe.presets.ChannelPreset
  num_channels: {num_channels}
federation:
  rounds: {rounds}
  num_units: {num_units}
  local_steps: 20
  round_timeout_s: 600
  clock: modelled
framework:
  name: collapipe
strategy:
  _target_: {strategy}
  drift_weight: {drift_weight}
task:
  _target_: collapipe.tasks.dates.Dates
"""
SKIPPED, FAILED, SET_ASIDE = 7, (3, 9), (5, 11)  # rounds
_BLOCKS = 6


def make_run(
    folder: Path,
    *,
    rounds: int = 20,
    num_units: int = 8,
    num_channels: int = 4,
    seed: int = 0,
    strategy: str = "optim.dssra.Dssra",
    drift_weight: float = 0.1,
    slowness: float = 1.0,
) -> Path:
    """Write a completed run; ``slowness`` scales its modelled delays, ``seed`` determines the
    rest."""
    folder.mkdir(parents=True)
    config = CONFIG.format(
        seed=seed,
        rounds=rounds,
        num_units=num_units,
        num_channels=num_channels,
        strategy=strategy,
        drift_weight=drift_weight,
    )
    (folder / "config.yaml").write_text(config)
    choices = {"strategy": strategy.rpartition(".")[2].lower()}
    (folder / "choices.json").write_text(json.dumps(choices))
    lines = list(made_lines(rounds, num_units, num_channels, seed, slowness))
    write_lines(folder, lines)
    shards = [{"unit": unit, "rows": 1000 + unit, "labels": {}} for unit in range(num_units)]
    (folder / "shards.json").write_text(json.dumps({"labels": [], "shards": shards}))
    write_summary(folder, status="completed", error=None)
    return folder


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write ``metrics.jsonl``."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def write_summary(folder: Path, **values: Any) -> None:
    """Write ``summary.json``, with a test metric unless ``metric`` is given."""
    metric = {"name": "BLEU", "value": 87.5, "signature": "made up", "extra_metrics": {}}
    summary = {"version": "9.8.7", "metric": metric, "test_loss": 0.25, "wall_s": 99.0, **values}
    (folder / "summary.json").write_text(json.dumps(summary))


def made_lines(
    rounds: int, num_units: int = 8, num_channels: int = 4, seed: int = 0, slowness: float = 1.0
) -> Iterator[dict[str, Any]]:
    """Yield the lines of ``metrics.jsonl``."""
    rng = np.random.default_rng(seed)
    queues, clock_s, wall_s = np.zeros(num_units), 0.0, 0.0
    for number in range(1, rounds + 1):
        report = _report(number, num_units, num_channels, rng, queues, clock_s, slowness)
        queues, clock_s = np.array(report.queues), report.clock_s
        line: dict[str, Any] = asdict(report)
        server = {"plan": 0.01, "train": 3 + rng.random(), "aggregate": 0.05}
        line["seconds"] = {**server, "round": sum(server.values()), **report.seconds}
        if number % 10 == 0 or number == rounds:
            line["seconds"]["evaluate"] = 0.5
            line["evaluation_loss"] = 5 * float(np.exp(-number / rounds)) + 0.1 * rng.random()
            value = 100 * number / rounds
            line["metric"] = {"name": "BLEU", "value": value, "signature": "x", "extra_metrics": {}}
        wall_s += line["seconds"]["round"] + line["seconds"].get("evaluate", 0.0)
        yield line | {"wall_s": wall_s}


def without_uploads(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the same rounds as if the strategy planned no channels."""
    for line in lines:
        plan, cost = copy.deepcopy(line["plan"]), copy.deepcopy(line["cost"])
        for cluster in plan["clusters"]:
            cluster["uplink"] = None
        for each in cost["clusters"]:
            alone = {"finish_s": each["pipeline_s"]}
            each |= {"upload_s": None, "upload_energy_j": 0.0, **alone}
        yield {**line, "plan": plan, "cost": cost}


def _report(
    number: int,
    num_units: int,
    num_channels: int,
    rng: np.random.Generator,
    queues: Any,
    clock_s: float,
    slowness: float,
) -> RoundReport:
    away = (num_units - 1,) if number in SET_ASIDE else ()
    chosen = rng.permutation(num_units - len(away))[:num_channels]
    scheduled = [] if number == SKIPPED else sorted(map(int, chosen))
    clusters = tuple(_cluster(n, unit, rng) for n, unit in enumerate(scheduled))
    failed = scheduled[:1] if number in FAILED else []
    costs = tuple(_cost(cluster, slowness) for cluster in clusters)
    delay_s = max((cost.ends_s for cost in costs), default=0.0)
    gammas = np.where(np.isin(np.arange(num_units), scheduled), 0.24, 1.24)
    after = tuple(map(float, np.maximum(queues + gammas - 0.84, 0)))
    planned = tuple(map(float, gammas)) if scheduled else ()
    plan = RoundPlan(number, clusters, planned, after, after, Certificate(1.0, 1.0, "exact", 0.01))
    loss = 5.5 * float(np.exp(-number / 60)) + 0.2 * float(rng.random())
    return RoundReport(
        round=number,
        plan=plan,
        cost=RoundCost(delay_s, costs),
        clock_s=clock_s + delay_s,
        skipped="no unit can afford its upload" if number == SKIPPED else None,
        excluded=dict.fromkeys(away, "WireError: a speed that is not finite"),
        queues=after,
        error_queues=(),
        units=tuple(unit for unit in scheduled if unit not in failed),
        failures=dict.fromkeys(failed, "LinkError: the unit was switched off"),
        train_loss=None if number == SKIPPED else loss,
        estimates=Estimates(12.5, 0.75, None),
        samples=1280 * (len(scheduled) - len(failed)),
        target_tokens=16000,
        bytes_up=4_500_000 * len(scheduled),
        bytes_down=4_400_000 * len(scheduled),
        seconds={"unit/forward": 1.1, "unit/backward": 1.2, "unit/head": 0.3, "unit/step": 0.05},
    )


def _cluster(channel: int, unit: int, rng: np.random.Generator) -> ClusterPlan:
    first = int(rng.integers(1, _BLOCKS))
    segments = (
        SegmentPlan("device-0", Span(0, first)),
        SegmentPlan("device-2", Span(first, _BLOCKS - first)),
    )
    power_w, upload_s = 0.1 + 0.1 * float(rng.random()), 0.5 + float(rng.random())
    latency_s = 10 + unit + 3 * float(rng.random())
    uplink = UplinkPlan(channel, power_w, upload_s, latency_s + upload_s)
    return ClusterPlan(unit, segments, 4, "one_f_one_b", latency_s, uplink)


def _cost(cluster: ClusterPlan, slowness: float) -> ClusterCost:
    assert cluster.latency_s is not None and cluster.uplink is not None
    uplink = cluster.uplink
    devices = {segment.device: 2.0 * segment.span.blocks for segment in cluster.segments}
    return ClusterCost(
        cluster.unit,
        slowness * cluster.latency_s,
        slowness * uplink.upload_s,
        uplink.power_w * uplink.upload_s,
        devices,
        slowness * uplink.finish_s,
    )
