"""Figs. 9 and 10: what is learned with several S and m, with and without dropout."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.figure import Finding, PaperFigure, above
from collapipe.reproduction.learning_curves import (
    COLUMNS,
    LearningCurve,
    curve_rows,
    learning_curves,
    mean_over_seeds,
)
from collapipe.reproduction.training import Experiment, Job
from collapipe.runs.evidence import Interval, over_seeds

RATES = (0.0, 0.1)  # of dropout
_ROUNDING = 0.1  # of a metric, in points
# As in Fig. 4: clusters that cannot afford a split would be excluded, and others compared.
UNLIMITED = "cluster.energy_j=1.0e6"
Curves = Mapping[tuple[float, str], LearningCurve]
"""A seed's curves, by dropout and the variant's label."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to split: label, folder and options of its runs, and what the paper says of it."""

    label: str
    folder: str
    overrides: tuple[str, ...]
    paper: str = ""


def split(segments: int, micro_batches: int, paper: str = "") -> Variant:
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
        paper,
    )


@dataclass(frozen=True)
class Study:
    """A figure's runs: the options that set dropout, and variants, compared with the first."""

    experiment: Experiment
    dropout: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def labels(self) -> list[str]:
        """Of the variants."""
        return [each.label for each in self.variants]

    def jobs(self, seed: int) -> dict[tuple[float, str], Job]:
        """Every variant with and without dropout."""
        return {
            (rate, each.label): Job(
                self.experiment,
                f"{each.folder}-dropout{rate:g}",
                seed,
                (*each.overrides, *(f"{option}={rate}" for option in self.dropout)),
            )
            for rate in RATES
            for each in self.variants
        }


def gains(seeds: Sequence[Curves], rate: float, first: str, other: str, what: str) -> Interval:
    """The first variant's ``test`` or ``test_loss`` minus another's, in pairs of the same seed,
    so of the same rows, weights and order."""
    return over_seeds(
        getattr(each[rate, first], what) - getattr(each[rate, other], what) for each in seeds
    )


def _findings(seeds: Sequence[Curves], study: Study) -> Iterator[Finding]:
    first, *others = study.variants
    for rate in RATES:
        metric, unit = seeds[0][rate, first.label].metric, seeds[0][rate, first.label].unit
        for label in study.labels:
            tests = over_seeds(each[rate, label].test for each in seeds)
            yield Finding(f"dropout {rate:g}: {metric} of {label}", tests, unit)
        for other in others:
            ours = gains(seeds, rate, first.label, other.label, "test")
            text = f"dropout {rate:g}: {metric} of {first.label} above that of {other.label}"
            yield above(text, other.paper, ours, "points", _ROUNDING)
            losses = gains(seeds, rate, first.label, other.label, "test_loss")
            text = f"dropout {rate:g}: test loss of {first.label} minus that of {other.label}"
            yield Finding(text, losses, "")


def _draw(seeds: Sequence[Curves], study: Study) -> Figure:
    figure, (left, *panels) = drawing.panels(3.4, 3)
    panels[1].sharex(panels[0])
    series = {
        label: mean_over_seeds([each[RATES[-1], label].validation for each in seeds])
        for label in study.labels
    }
    drawing.draw_lines(left, series, nested=True)
    label = seeds[0][RATES[-1], study.labels[0]].metric_label
    left.set(xlim=(0, None), ylim=(0, None), xlabel="round", ylabel=f"validation {label}")
    left.set_title(f"(a) dropout {RATES[-1]:g}")
    drawing.legend_below(left, 1)
    for letter, axes, rate in zip("bc", panels, RATES, strict=True):
        _draw_gains(axes, study, seeds, rate, labelled=letter == "b")
        axes.set_title(f"({letter}) dropout {rate:g}")
    return figure


def _draw_gains(
    axes: Axes, study: Study, seeds: Sequence[Curves], rate: float, labelled: bool
) -> None:
    """The others' test metric minus the first's."""
    first, *others = study.labels
    found = [gains(seeds, rate, other, first, "test") for other in others]
    places = range(len(others))
    drawing.error_bars(axes, places, found, level=True, marker="o")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, others if labelled else [""] * len(others))
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xlabel(f"test {seeds[0][rate, first].metric}, points\nagainst {first}")


def _figure(name: str, study: Study) -> PaperFigure[Curves]:
    return PaperFigure(
        name,
        ("dropout", "variant", *COLUMNS),
        learning_curves,
        curve_rows,
        functools.partial(_findings, study=study),
        functools.partial(_draw, study=study),
        num_seeds=3,
        jobs=study.jobs,
        basis="learning is real, measured on held-out rows",
    )


_BEST = "S = 2, m = 2 is best"
FIG09 = _figure(
    "fig09",
    Study(
        Experiment("fig09", "multi30k", "full_transformer"),
        ("model.dropout",),
        (split(2, 2), split(6, 2, _BEST), split(2, 8, _BEST)),
    ),
)
_BLIND = Variant(
    "w/o SS, m ≤ 2",
    "no-ss",
    (
        UNLIMITED,
        "framework=collapipe_no_ss",
        "strategy.latency=bound",
        "pipeline.num_micro_batches=2",
    ),
    "slightly worse without segment scheduling",
)
FIG10 = _figure(
    "fig10",
    Study(
        Experiment("fig10", "chinese_ner", "full_bert"),
        ("model.config.hidden_dropout_prob", "model.config.attention_probs_dropout_prob"),
        (split(2, 2), split(2, 8, "a smaller m converges better"), _BLIND),
    ),
)
