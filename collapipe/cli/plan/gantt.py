"""The pipelines of a decision as Gantt charts, one row a device.

In a joint round all clusters have one axis of time, and who takes part a row for its upload.
"""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from collapipe.cli.plan.decision import Decision
from collapipe.errors import ConfigError
from collapipe.formatting import seconds
from collapipe.plan import Span
from optim.problem import Allocation, ClusterProblem, Partition
from optim.timeline import Stage, timeline

_WIDTH_IN, _ROW_IN, _MARGIN_IN, _LEGEND_IN = 9.0, 0.42, 0.8, 0.6
_LABELLED_FROM = 0.017  # of the axis: a bar that has room for its number
_SHADES, _HOPS = ("#3b6ea5", "#a9c6e3"), ("#222222", "#909090")  # apart in grey, too
_UPLOAD = "#c98b3a"
_NUMBERS = ("white", "black")
_BAR, _HOP_BAR = 0.56, 0.14  # of a row's height


def draw(decision: Decision, file: Path) -> None:
    """Write the chart; the suffix says whether it becomes an SVG or a PNG.

    Raises ``ConfigError`` where the file cannot be written.
    """
    clusters = decision.inventory.clusters
    rows = [len(each.boxes) + bool(_upload(decision, n)) for n, each in enumerate(clusters)]
    joint = decision.round is not None
    height = _ROW_IN * sum(rows) + _MARGIN_IN * len(rows) + _LEGEND_IN
    figure = Figure((_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
    ends = [_end_s(decision, unit) for unit in range(len(rows))]
    for unit, each in enumerate(axes):
        _draw_cluster(each, decision, unit, max(ends) if joint else ends[unit])
    figure.legend(handles=_legend(joint), loc="outside lower center", ncols=2, frameon=False)
    with rc_context({"svg.hashsalt": "collapipe"}):  # the same plan makes the same file
        _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    suffix = file.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if suffix == "svg" else None
    try:
        figure.savefig(file, format=suffix, dpi=160, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot be written ({error.strerror})") from error


def _upload(decision: Decision, unit: int) -> Allocation | None:
    return decision.round.of(unit) if decision.round else None


def _end_s(decision: Decision, unit: int) -> float:
    """When a cluster's batch, and its upload where it has one, is done."""
    allocation = _upload(decision, unit)
    return decision.partition(unit).latency_s + (allocation.upload_s if allocation else 0.0)


def _draw_cluster(axes: Axes, decision: Decision, unit: int, until_s: float) -> None:
    problem, partition = decision.problems[unit], decision.partition(unit)
    stages, allocation = timeline(problem, partition), _upload(decision, unit)
    for stage in stages:
        _draw_stage(axes, stage, until_s)
    names = _row_names(problem, stages)
    if allocation:
        top = len(names) - (_BAR + _HOP_BAR) / 2
        upload = (partition.latency_s, allocation.upload_s)
        axes.broken_barh([upload], (top, _BAR), facecolors=_UPLOAD, linewidth=0)
        names.append(f"upload\nchannel {allocation.channel}")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, until_s)
    axes.set_xlabel("time from the beginning of a batch [s]")
    axes.set_title(_title(decision, unit, partition), loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_stage(axes: Axes, stage: Stage, until_s: float) -> None:
    top = stage.device - (_BAR + _HOP_BAR) / 2
    computes = [(start, stage.compute_s) for start in stage.computes]
    hops = [(start, stage.hop_s) for start in stage.hops]
    shades, greys = ([pair[n % 2] for n in range(len(hops))] for pair in (_SHADES, _HOPS))
    axes.broken_barh(computes, (top, _BAR), facecolors=shades, linewidth=0)
    axes.broken_barh(
        hops, (top + _BAR, _HOP_BAR), facecolors=greys, edgecolors=greys, linewidth=0.4
    )
    if stage.compute_s < _LABELLED_FROM * until_s:
        return
    for number, start in enumerate(stage.computes):
        axes.text(
            start + stage.compute_s / 2,
            top + _BAR / 2,
            str(number + 1),
            color=_NUMBERS[number % 2],
            fontsize=7,
            ha="center",
            va="center",
        )


def _row_names(problem: ClusterProblem, stages: tuple[Stage, ...]) -> list[str]:
    held = {stage.device: stage.span for stage in stages}
    names = []
    for number, device in enumerate(problem.devices):
        span, name = held.get(number), device.name.replace("$", r"\$")
        names.append(f"{name}\n{_blocks(span) if span else 'not used'}")
    return names


def _blocks(span: Span) -> str:
    last = span.stop - 1
    return f"block {last}" if span.blocks == 1 else f"blocks {span.first}-{last}"


def _title(decision: Decision, unit: int, partition: Partition) -> str:
    name = decision.inventory.clusters[unit].name
    sits_out = decision.round is not None and _upload(decision, unit) is None
    how = f"S = {partition.num_segments}, m = {partition.num_micro_batches}"
    if partition.replicated:
        how = "each device trains the whole encoder"
    allocation = _upload(decision, unit)
    upload = f", upload {seconds(allocation.upload_s)}" if allocation else ""
    idle = ", idle in this round" if sits_out else ""
    return f"{name}: {how}, {seconds(partition.latency_s)} a batch{upload}{idle}"


def _legend(joint: bool) -> list[Patch]:
    patches = [
        Patch(facecolor=_SHADES[0], label="odd micro-batch, forward and backward"),
        Patch(facecolor=_SHADES[1], label="even micro-batch"),
        Patch(facecolor=_HOPS[0], label="hop to the next device, or back to the control unit"),
    ]
    return [*patches, Patch(facecolor=_UPLOAD, label="upload")] if joint else patches
