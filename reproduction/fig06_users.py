"""Fig. 6's VanillaFL if every device is a data user, as in Table III ("Large").

It is compared, on translation, with Fig. 6's reading, in which a cluster's devices share its
batches. A user's step has b/K samples, so rows per round and time per device are equal.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from collapipe.runs.evidence import over_seeds
from reproduction import drawing, fig06, learning_curves
from reproduction.figure import Finding, Ours, PaperFigure, near
from reproduction.learning_curves import LearningCurve, mean_over_seeds
from reproduction.training import SINGLE, Job

CLUSTERS, DEVICES = "vanilla_fl", "vanilla_fl_devices"
LABELS: Mapping[str, str] = {CLUSTERS: "3 users, clusters", DEVICES: "18 users, devices"}
_BATCH = {CLUSTERS: (), DEVICES: ("batch_size=11",)}  # of 64 rows a cluster, K = 6
Key = tuple[str]  # framework
Seeds = Sequence[Mapping[Key, LearningCurve]]


def _jobs(seed: int) -> dict[Key, Job]:
    experiment = fig06.TASKS["translation"]
    return {
        (name,): Job(experiment, name, seed, (f"framework={name}", SINGLE, *_BATCH[name]))
        for name in LABELS
    }


def _findings(seeds: Seeds) -> Iterator[Finding]:
    clusters, devices = ([each[name,] for each in seeds] for name in LABELS)
    # CollaPipe's curve equals that of VanillaFL's clusters (Fig. 6), so it replaces them here.
    mean = float(np.mean([each.test for each in devices]))
    pairs = list(zip(clusters, devices, strict=True))
    gains = over_seeds(100 * (own.test - other.test) / mean for own, other in pairs)
    yield near("test BLEU with 3 users above that with 18", 19.5, gains, "%")
    losses = over_seeds(other.test_loss - own.test_loss for own, other in pairs)
    yield Finding("test loss with 18 users above that with 3", losses, "")
    for name, label in LABELS.items():
        curves = [each[name,] for each in seeds]
        yield Finding(f"{label}: test loss", over_seeds(each.test_loss for each in curves), "")
        yield Finding(f"{label}: test BLEU", over_seeds(each.test for each in curves), "")
        for axis, what in (("devices_s", "on devices"), ("clock_s", "with uploads")):
            ends = over_seeds(each.end(axis) for each in curves)
            yield Finding(f"{label}: seconds {what}", ends, "s")


def _draw(seeds: Seeds, _: Ours) -> Figure:
    figure, panels = drawing.panels(3.0, len(fig06.AXES), sharey=True)
    for axes, (axis, label) in zip(panels, fig06.AXIS_LABELS.items(), strict=True):
        unit = 1.0 if axis == "rounds" else 3600.0
        series = {
            LABELS[name]: mean_over_seeds([each[name,] for each in seeds], "losses", axis, unit)
            for name in LABELS
        }
        drawing.draw_lines(axes, series)
        axes.set(xlim=(0, None), xlabel=label)
    panels[0].set_ylabel("translation: training loss")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(LABELS))
    return figure


_COLUMNS = ("framework", *learning_curves.COLUMNS)
FIGURE = PaperFigure(
    "fig06_users",
    _COLUMNS,
    learning_curves.curves,
    learning_curves.rows,
    _findings,
    _draw,
    num_seeds=3,
    jobs=_jobs,
    basis=f"{learning_curves.BASIS}; its seconds are modelled",
)
