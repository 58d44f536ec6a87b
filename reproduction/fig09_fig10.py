"""Figs. 9 and 10: learning with several S and m, with and without dropout.

The paper does not say how a device combines the gradients of m micro-batches. Here their sum is the
gradient of the batch's mean loss. Two other readings are compared with m = 2 and m = 8: the sum of
gradients of micro-batches' mean losses, and a step after each micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from collapipe.config import Settings
from collapipe.runs.evidence import over_seeds
from reproduction import drawing, learning_curves
from reproduction.figure import Finding, Ours, PaperFigure, above
from reproduction.learning_curves import LearningCurve, mean_over_seeds
from reproduction.training import Experiment, Job

RATES = (0.0, 0.1)  # of dropout
_FEW, _MANY = 2, 8  # m
_SMALLER = "a smaller m converges better"
_SHOWN = "validation"
_ROUNDING = 0.1  # of a metric, in points
# As in Fig. 4: clusters that cannot afford a split would be excluded, and others compared.
_UNLIMITED = "cluster.energy_j=1.0e6"
Curves = Mapping[tuple[float, str], LearningCurve]
"""A seed's curves, by dropout and the variant's label."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to split: label, folder and options of its runs, and the paper's statement about it.

    It is compared with the variant of another label, by default the first. ``derive``: see ``Job``.
    """

    label: str
    folder: str
    overrides: tuple[str, ...]
    paper: str = ""
    against: str = ""
    derive: Callable[[Settings], tuple[str, ...]] | None = None


def _split(segments: int, micro_batches: int, paper: str = "") -> Variant:
    """Return the variant of an even split into S segments with m micro-batches."""
    label, folder = f"S = {segments}, m = {micro_batches}", f"s{segments}-m{micro_batches}"
    sizes = f"pipeline.num_segments={segments}", f"pipeline.num_micro_batches={micro_batches}"
    return Variant(label, folder, ("strategy=even", "~strategy.energy", *sizes), paper)


def summed(settings: Settings) -> tuple[str, ...]:
    """Return options that imitate the sum of gradients of micro-batches' mean losses.

    The sum is m times the gradient of the batch's mean loss. For AdamW this equals ε/m and the clip
    norm divided by m.
    """
    m, optimizer = settings.pipeline.num_micro_batches, settings.optimizer
    norm = optimizer.clip_norm and optimizer.clip_norm / m
    return f"optimizer.eps={optimizer.eps / m}", f"optimizer.clip_norm={norm or 'null'}"


def stepped(settings: Settings) -> tuple[str, ...]:
    """Return options for a step after each micro-batch: m times as many steps of b/m samples."""
    m = settings.pipeline.num_micro_batches
    return (
        "pipeline.num_micro_batches=1",
        f"batch_size={settings.batch_size // m}",
        f"federation.local_steps={settings.federation.local_steps * m}",
        f"optimizer.warmup_steps={settings.optimizer.warmup_steps * m}",
    )


def _read_as(how: str, derive: Callable[[Settings], tuple[str, ...]]) -> tuple[Variant, ...]:
    """Return variants with few and with many micro-batches in another reading of gradients."""
    few, many = _split(2, _FEW), _split(2, _MANY, _SMALLER)
    name, best = how.replace(" ", "-"), f"{few.label}, {how}"
    return tuple(
        replace(
            each,
            label=f"{each.label}, {how}",
            folder=f"{each.folder}-{name}",
            derive=derive,
            against=best if each is many else "",
        )
        for each in (few, many)
    )


@dataclass(frozen=True)
class Study:
    """A figure: its runs, the options that set dropout, and variants."""

    experiment: Experiment
    dropout: tuple[str, ...]
    variants: tuple[Variant, ...]

    def figure(self) -> PaperFigure[Curves]:
        """The figure, named like its experiment."""
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
        """Return the jobs of every variant, with and without dropout."""
        return {
            (rate, each.label): Job(
                self.experiment,
                f"{each.folder}-dropout{rate:g}",
                seed,
                (_UNLIMITED, *each.overrides, *(f"{option}={rate}" for option in self.dropout)),
                each.derive,
            )
            for rate in RATES
            for each in self.variants
        }

    def _findings(self, seeds: Sequence[Curves]) -> Iterator[Finding]:
        """Yield differences between runs of one seed, with equal rows, weights and order."""
        first, *others = self.variants
        curve = seeds[0][RATES[0], first.label]
        metric, unit = curve.metric, curve.unit
        for rate in RATES:
            for variant in self.variants:
                tests = over_seeds(each[rate, variant.label].test for each in seeds)
                yield Finding(f"dropout {rate:g}: {metric} of {variant.label}", tests, unit)
            for other in others:
                best = other.against or first.label
                pairs = [(each[rate, best], each[rate, other.label]) for each in seeds]
                gains = over_seeds(one.test - their.test for one, their in pairs)
                text = f"dropout {rate:g}: {{}} of {best} {{}} that of {other.label}"
                gain = text.format(metric, "above")
                claim = above(gain, other.paper, gains, "points", _ROUNDING)
                yield claim if other.paper else Finding(gain, gains, "points")
                losses = over_seeds(one.test_loss - their.test_loss for one, their in pairs)
                yield Finding(text.format("test loss", "minus"), losses, "")

    def _draw(self, seeds: Sequence[Curves], ours: Ours) -> Figure:
        first, *others = self.variants
        figure, (left, *panels) = drawing.panels(4.2, 3, width_ratios=[1.6, 1, 1])
        panels[1].sharex(panels[0])
        series = {
            each.label: mean_over_seeds([seed[RATES[-1], each.label] for seed in seeds], _SHOWN)
            for each in self.variants
        }
        drawing.draw_lines(left, series, nested=True, bands=False)
        curve = seeds[0][RATES[-1], first.label]
        left.set(xlim=(0, None), ylim=(0, None), xlabel="round")
        left.set(ylabel=f"validation {curve.metric_label}", title=f"(a) dropout {RATES[-1]:g}")
        drawing.legend_below(left, 1)
        for letter, axes, rate in zip("bc", panels, RATES, strict=True):
            text = f"dropout {rate:g}: {curve.metric} of {{}} above that of {{}}"
            gains = [-ours[text.format(o.against or first.label, o.label)] for o in others]
            drawing.error_bars(axes, range(len(others)), gains, level=True, marker="o")
            axes.axvline(0, color="black", linewidth=0.8)
            labels = [o.label for o in others] if letter == "b" else [""] * len(others)
            axes.set_yticks(range(len(others)), labels)
            axes.set_ylim(len(others) - 0.5, -0.5)
            axes.set_xlabel(f"test {curve.metric}, points\nagainst m = {_FEW}")
            axes.set_title(f"({letter}) dropout {rate:g}")
        return figure


_BEST = "S = 2, m = 2 is best"
_READINGS = *_read_as("summed", summed), *_read_as("a step each", stepped)
FIG09 = Study(
    Experiment("fig09", "multi30k", "full_transformer"),
    ("model.dropout",),
    (_split(2, _FEW), _split(6, _FEW, _BEST), _split(2, _MANY, _BEST), *_READINGS),
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
    (_split(2, _FEW), _split(2, _MANY, _SMALLER), _BLIND, *_READINGS),
).figure()
