"""Figs. 9 and 10: what is learned with several S and m, with and without dropout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from collapipe.reproduction import drawing, learning_curves
from collapipe.reproduction.figure import Finding, Ours, PaperFigure, above
from collapipe.reproduction.learning_curves import LearningCurve, mean_over_seeds
from collapipe.reproduction.training import Experiment, Job
from collapipe.runs.evidence import over_seeds

RATES = (0.0, 0.1)  # of dropout
_ROUNDING = 0.1  # of a metric, in points
# As in Fig. 4: clusters that cannot afford a split would be excluded, and others compared.
_UNLIMITED = "cluster.energy_j=1.0e6"
Curves = Mapping[tuple[float, str], LearningCurve]
"""A seed's curves, by dropout and the variant's label."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to split: label, folder and options of its runs, and what the paper says of it."""

    label: str
    folder: str
    overrides: tuple[str, ...]
    paper: str = ""


def _split(segments: int, micro_batches: int, paper: str = "") -> Variant:
    """An even split into S segments, m micro-batches."""
    label, folder = f"S = {segments}, m = {micro_batches}", f"s{segments}-m{micro_batches}"
    sizes = f"pipeline.num_segments={segments}", f"pipeline.num_micro_batches={micro_batches}"
    return Variant(label, folder, ("strategy=even", "~strategy.energy", *sizes), paper)


@dataclass(frozen=True)
class Study:
    """A figure: its runs, the options that set dropout, and variants, compared with the first."""

    experiment: Experiment
    dropout: tuple[str, ...]
    variants: tuple[Variant, ...]

    def figure(self) -> PaperFigure[Curves]:
        """Named as its experiment."""
        return PaperFigure(
            self.experiment.name,
            ("dropout", "variant", *learning_curves.COLUMNS),
            learning_curves.curves,
            learning_curves.rows,
            self._findings,
            self._draw,
            num_seeds=3,
            jobs=self._jobs,
            basis=learning_curves.BASIS,
        )

    def _jobs(self, seed: int) -> dict[tuple[float, str], Job]:
        """Every variant with and without dropout."""
        return {
            (rate, each.label): Job(
                self.experiment,
                f"{each.folder}-dropout{rate:g}",
                seed,
                (_UNLIMITED, *each.overrides, *(f"{option}={rate}" for option in self.dropout)),
            )
            for rate in RATES
            for each in self.variants
        }

    def _findings(self, seeds: Sequence[Curves]) -> Iterator[Finding]:
        """Differences are of pairs of one seed, so of the same rows, weights and order."""
        first, *others = self.variants
        curve = seeds[0][RATES[0], first.label]
        metric, unit = curve.metric, curve.unit
        for rate in RATES:
            for variant in self.variants:
                tests = over_seeds(each[rate, variant.label].test for each in seeds)
                yield Finding(f"dropout {rate:g}: {metric} of {variant.label}", tests, unit)
            for other in others:
                pairs = [(each[rate, first.label], each[rate, other.label]) for each in seeds]
                gains = over_seeds(one.test - their.test for one, their in pairs)
                text = f"dropout {rate:g}: {{}} of {first.label} {{}} that of {other.label}"
                claim = text.format(metric, "above")
                yield above(claim, other.paper, gains, "points", _ROUNDING)
                losses = over_seeds(one.test_loss - their.test_loss for one, their in pairs)
                yield Finding(text.format("test loss", "minus"), losses, "")

    def _draw(self, seeds: Sequence[Curves], ours: Ours) -> Figure:
        first, *others = (each.label for each in self.variants)
        figure, (left, *panels) = drawing.panels(3.4, 3)
        panels[1].sharex(panels[0])
        series = {
            label: mean_over_seeds([each[RATES[-1], label] for each in seeds], "validation")
            for label in (first, *others)
        }
        drawing.draw_lines(left, series, nested=True)
        curve = seeds[0][RATES[-1], first]
        left.set(xlim=(0, None), ylim=(0, None), xlabel="round")
        left.set(ylabel=f"validation {curve.metric_label}", title=f"(a) dropout {RATES[-1]:g}")
        drawing.legend_below(left, 1)
        for letter, axes, rate in zip("bc", panels, RATES, strict=True):
            text = f"dropout {rate:g}: {curve.metric} of {first} above that of {{}}"
            gains = [-ours[text.format(other)] for other in others]
            drawing.error_bars(axes, range(len(others)), gains, level=True, marker="o")
            axes.axvline(0, color="black", linewidth=0.8)
            labels = others if letter == "b" else [""] * len(others)
            axes.set_yticks(range(len(others)), labels)
            axes.set_ylim(len(others) - 0.5, -0.5)
            axes.set_xlabel(f"test {curve.metric}, points\nagainst {first}")
            axes.set_title(f"({letter}) dropout {rate:g}")
        return figure


_BEST = "S = 2, m = 2 is best"
FIG09 = Study(
    Experiment("fig09", "multi30k", "full_transformer"),
    ("model.dropout",),
    (_split(2, 2), _split(6, 2, _BEST), _split(2, 8, _BEST)),
).figure()
_BLIND = Variant(
    "w/o SS, m ≤ 2",
    "no-ss",
    ("framework=collapipe_no_ss", "strategy.latency=bound", "pipeline.num_micro_batches=2"),
    "slightly worse without segment scheduling",
)
FIG10 = Study(
    Experiment("fig10", "chinese_ner", "full_bert"),
    ("model.config.hidden_dropout_prob", "model.config.attention_probs_dropout_prob"),
    (_split(2, 2), _split(2, 8, "a smaller m converges better"), _BLIND),
).figure()
