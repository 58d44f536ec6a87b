"""Figs. 7 and 8: what rounds add up to on devices, against what the paper claims."""

from collections.abc import Callable, Sequence

from collapipe.reproduction import comparison
from collapipe.reproduction.accumulated_picture import picture
from collapipe.reproduction.comparison import BLIND, METHODS, OTHERS, OWN, Sample
from collapipe.reproduction.worlds import BATCH_SIZE, paper_world
from collapipe.runs.evidence import (
    Cell,
    Claim,
    Evidence,
    Finding,
    Interval,
    over_seeds,
    share_over_seeds,
    within_a_quarter,
)

Total = Callable[[Sample, str], float]


def evidence(seeds: Sequence[int], num_blocks: int) -> Evidence:
    """All methods' rounds, for an encoder of ``num_blocks``."""
    by_seed = {seed: comparison.sample(seed, num_blocks) for seed in seeds}
    samples = list(by_seed.values())
    return Evidence(
        columns=(
            "seed",
            "method",
            "round",
            "devices_s",
            "slowest_s",
            "upload_s",
            "accumulated_devices_s",
            "accumulated_total_s",
        ),
        rows=[row for seed, each in by_seed.items() for row in _rows(seed, each)],
        claims=(
            *_claims(samples, Sample.on_devices, "on devices"),
            *_claims(samples, Sample.with_uploads, "with uploads"),
        ),
        findings=_findings(samples),
        settings={
            "num_blocks": num_blocks,
            "batch_size": BATCH_SIZE,
            "rounds": comparison.ROUNDS,
            "clusters_per_round": comparison.CLUSTERS,
            "local_steps": 1,
            "latency": "bound",
        },
        picture=picture(samples),
    )


def _rows(seed: int, sample: Sample) -> list[tuple[Cell, ...]]:
    rows = list[tuple[Cell, ...]]()
    for method in METHODS:
        devices, uploads = sample.devices_s[method], sample.uploads_s(method)
        columns = (
            devices,
            sample.slowest_s[method],
            uploads,
            devices.cumsum(),
            (devices + uploads).cumsum(),
        )
        for number, values in enumerate(zip(*columns, strict=True), start=1):
            rows.append((seed, method, number, *map(float, values)))
    return rows


def _cut(samples: Sequence[Sample], total: Total, of: str, against: str) -> Interval:
    """By how many percent one method's total is below another's."""
    return over_seeds([100 * (1 - total(each, of) / total(each, against)) for each in samples])


def _claims(samples: Sequence[Sample], total: Total, counted: str) -> tuple[Claim, ...]:
    blind = over_seeds([100 * (total(each, BLIND) / total(each, OWN) - 1) for each in samples])
    return tuple(
        within_a_quarter(f"{text}, {counted}", paper, ours, "%")
        for text, paper, ours in (
            ("cut against VanillaFL", 15.09, _cut(samples, total, OWN, "vanilla_fl")),
            ("cut against TITANIC", 18.94, _cut(samples, total, OWN, "titanic")),
            ("cut against PipeLine", 40.55, _cut(samples, total, OWN, "pipeline")),
            ("increase without segment scheduling", 22.45, blind),
            (
                "VanillaFL's cut against PipeLine",
                29.98,
                _cut(samples, total, "vanilla_fl", "pipeline"),
            ),
        )
    )


def _findings(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    return (
        *_totals(samples, Sample.on_devices, "on devices"),
        *_totals(samples, Sample.with_uploads, "with uploads"),
        *_cuts(samples, Sample.on_devices, "on devices"),
        *_cuts(samples, Sample.of_slowest, "on devices, the slowest cluster of each round"),
        *_cuts(samples, Sample.with_uploads, "with uploads"),
        Finding(
            "cut against VanillaFL, with uploads, its devices' adapters one after another",
            over_seeds(
                [100 * (1 - each.with_uploads(OWN) / _one_by_one(each)) for each in samples]
            ),
            "%",
        ),
        *_broken(samples),
    )


def _one_by_one(sample: Sample) -> float:
    """VanillaFL's total where all devices of a cluster send adapters on the cluster's channel."""
    devices = paper_world().cluster.num_devices
    return sample.on_devices("vanilla_fl") + devices * float(sample.adapters_s.sum())


def _totals(samples: Sequence[Sample], total: Total, counted: str) -> list[Finding]:
    return [
        Finding(
            f"{each.label}: total, {counted}",
            over_seeds([total(one, method) for one in samples]),
            "s",
        )
        for method, each in METHODS.items()
    ]


def _cuts(samples: Sequence[Sample], total: Total, counted: str) -> list[Finding]:
    return [
        Finding(
            f"cut against {METHODS[method].label}, {counted}",
            _cut(samples, total, OWN, method),
            "%",
        )
        for method in OTHERS
    ]


def _broken(samples: Sequence[Sample]) -> list[Finding]:
    clusters = comparison.ROUNDS * comparison.CLUSTERS
    return [
        Finding(
            f"{METHODS[method].label}: clusters whose memory or energy it exceeds",
            share_over_seeds([100 * each.broken[method] / clusters for each in samples]),
            "%",
        )
        for method in OTHERS
    ]
