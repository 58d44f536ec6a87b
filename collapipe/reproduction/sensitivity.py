"""Figs. 9 and 10: what is learned under several S and m, with and without dropout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.training import Experiment, Job, Training
from collapipe.reproduction.training_curves import COLUMNS, Curve, Points, curve, rows
from collapipe.runs.evidence import Claim, Evidence, Finding, Interval, leads, over_seeds

RATES = (0.0, 0.1)  # of dropout
_ROUNDING = 0.1  # of a metric, in points
# As in Fig. 4: a cluster whose devices cannot afford a split would sit out, and others be compared.
UNLIMITED = "cluster.energy_j=1.0e6"
Sample = Mapping[str, Curve]
"""A seed's curves, by variant."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to split: its name in the picture and its options; ``folder``: of its runs."""

    label: str
    folder: str
    overrides: tuple[str, ...]


def split(segments: int, micro_batches: int) -> Variant:
    """An even split into S segments, m micro-batches."""
    return Variant(
        f"S = {segments}, m = {micro_batches}",
        f"s{segments}-m{micro_batches}",
        (
            UNLIMITED,
            "strategy=even",
            f"pipeline.num_segments={segments}",
            f"pipeline.num_micro_batches={micro_batches}",
        ),
    )


@dataclass(frozen=True)
class Study:
    """A figure's runs.

    Attributes
    ----------
    dropout
        The model's options that set it.
    variants
        The first is what the others are compared with.
    paper
        What the paper says of each of the others; none: it says nothing.
    """

    experiment: Experiment
    dropout: tuple[str, ...]
    variants: tuple[Variant, ...]
    paper: Mapping[str, str]


def evidence(seeds: Sequence[int], training: Training, study: Study) -> Evidence:
    """Differences of the same seed, so of the same rows, weights and order."""
    jobs = {
        (rate, seed, each.label): _job(study, rate, seed, each)
        for rate in RATES
        for seed in seeds
        for each in study.variants
    }
    runs = training.runs(list(jobs.values()))
    curves = {key: curve(runs[job]) for key, job in jobs.items()}
    samples = {
        rate: [
            {each.label: curves[rate, seed, each.label] for each in study.variants}
            for seed in seeds
        ]
        for rate in RATES
    }
    return Evidence(
        columns=("dropout", "variant", "seed", *COLUMNS),
        rows=[
            (rate, label, seed, *row)
            for (rate, seed, label), each in curves.items()
            for row in rows(each)
        ],
        claims=tuple(_claims(study, samples)),
        findings=tuple(_findings(study, samples)),
        settings={
            "sizes": training.sizes,
            "runs": len(curves),
            "runs_wall_s": round(sum(each.wall_s for each in curves.values())),
        },
        picture=_picture(study, samples),
        what="learning is real, measured on held-out rows",
    )


def _job(study: Study, rate: float, seed: int, variant: Variant) -> Job:
    overrides = (*variant.overrides, *(f"{option}={rate}" for option in study.dropout))
    return Job(study.experiment, f"{variant.folder}-dropout{rate:g}", seed, overrides)


def gains(samples: Sequence[Sample], first: str, other: str, what: str) -> Interval:
    """The first variant's ``test`` or ``test_loss`` minus another's, in pairs of the same seed."""
    return over_seeds([getattr(each[first], what) - getattr(each[other], what) for each in samples])


def _claims(study: Study, samples: Mapping[float, Sequence[Sample]]) -> list[Claim]:
    first = study.variants[0].label
    found = list[Claim]()
    for rate, each in samples.items():
        for other, paper in study.paper.items():
            ours = gains(each, first, other, "test")
            text = f"dropout {rate:g}: {each[0][first].metric} of {first} above that of {other}"
            found.append(leads(text, paper, ours, "points", _ROUNDING))
    return found


def _findings(study: Study, samples: Mapping[float, Sequence[Sample]]) -> list[Finding]:
    first, *others = (each.label for each in study.variants)
    found = list[Finding]()
    for rate, each in samples.items():
        metric, unit = each[0][first].metric, each[0][first].unit
        for label in (first, *others):
            tests = over_seeds([sample[label].test for sample in each])
            found.append(Finding(f"dropout {rate:g}: {metric} of {label}", tests, unit))
        for other in others:
            losses = gains(each, first, other, "test_loss")
            text = f"dropout {rate:g}: test loss of {first} minus that of {other}"
            found.append(Finding(text, losses, ""))
    return found


def _picture(study: Study, samples: Mapping[float, Sequence[Sample]]) -> Figure:
    figure, axes = drawing.panels(3.4, 3)
    axes[2].sharex(axes[1])
    _draw_curves(axes[0], study, samples[RATES[-1]])
    for place, (panel, rate) in enumerate(zip(axes[1:], RATES, strict=True)):
        _draw_gains(panel, study, samples[rate], labelled=place == 0)
        panel.set_title(f"({'bc'[place]}) dropout {rate:g}")
    drawing.legend_below(figure, axes[:1], 3)
    return figure


def _draw_curves(axes: Axes, study: Study, samples: Sequence[Sample]) -> None:
    for mark, variant in zip(drawing.MARKS, study.variants, strict=False):
        mean = Points.mean([each[variant.label].validation for each in samples])
        axes.plot(mean.rounds, mean.values, **mark.as_line(), label=variant.label)
    first = samples[0][study.variants[0].label]
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("round")
    axes.set_ylabel(f"validation {first.metric}{first.unit and f' [{first.unit}]'}")
    axes.set_title(f"(a) dropout {RATES[-1]:g}")


def _draw_gains(axes: Axes, study: Study, samples: Sequence[Sample], labelled: bool) -> None:
    """The others' test metric minus the first's."""
    first, *others = (each.label for each in study.variants)
    found = [gains(samples, other, first, "test") for other in others]
    places = list(range(len(others)))
    axes.plot([each.mean for each in found], places, "o", color="black", markersize=4)
    drawing.level_error_bars(axes, places, found)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, others if labelled else [""] * len(others))
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xlabel(f"test {samples[0][first].metric}, points\nagainst {first}")
