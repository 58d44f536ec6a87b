"""The pipelines of a decision as Gantt charts, one row a device."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from collapipe.cli.decision import Decision
from collapipe.cli.printing import seconds
from collapipe.cli.timeline import Stage, timeline
from collapipe.errors import ConfigError
from collapipe.plan import Span
from optim.problem import ClusterProblem, Partition

_WIDTH_IN, _ROW_IN, _MARGIN_IN, _LEGEND_IN = 9.0, 0.42, 0.8, 0.3
_LABELLED_FROM = 0.017  # of the axis: a bar that has room for its number
_SHADES, _HOP = ("#3b6ea5", "#a9c6e3"), "#222222"  # apart in grey, too
_NUMBERS = ("white", "black")
_BAR, _HOP_BAR = 0.56, 0.14  # of a row's height


def draw(decision: Decision, file: Path) -> None:
    """Write the chart; the suffix says whether it becomes an SVG or a PNG.

    Raises ``ConfigError`` where the file cannot be written.
    """
    clusters = decision.inventory.clusters
    rows = [len(cluster.boxes) for cluster in clusters]
    height = _ROW_IN * sum(rows) + _MARGIN_IN * len(rows) + _LEGEND_IN
    figure = Figure((_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
    for unit, each in enumerate(axes):
        _draw_cluster(each, decision, unit)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
    with rc_context({"svg.hashsalt": "collapipe"}):  # the same plan makes the same file
        _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    metadata = {"Date": None} if file.suffix == ".svg" else None
    try:
        figure.savefig(file, dpi=160, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot be written ({error.strerror})") from error


def _draw_cluster(axes: Axes, decision: Decision, unit: int) -> None:
    problem, partition = decision.problems[unit], decision.partition(unit)
    stages = timeline(problem, partition)
    used = [stage.device for stage in stages]
    order = used + [device for device in range(len(problem.devices)) if device not in used]
    for row, stage in enumerate(stages):
        _draw_stage(axes, row, stage, partition.latency_s)
    axes.set_yticks(range(len(order)), _row_names(problem, stages, order))
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(0, partition.latency_s)
    axes.set_xlabel("time from the beginning of a batch [s]")
    axes.set_title(_title(decision, unit, partition), loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_stage(axes: Axes, row: int, stage: Stage, latency_s: float) -> None:
    top = row - (_BAR + _HOP_BAR) / 2
    computes = [(start, stage.compute_s) for start in stage.computes]
    hops = [(start, stage.hop_s) for start in stage.hops]
    shades = [_SHADES[number % 2] for number in range(len(computes))]
    axes.broken_barh(computes, (top, _BAR), facecolors=shades, linewidth=0)
    axes.broken_barh(hops, (top + _BAR, _HOP_BAR), facecolors=_HOP, edgecolors=_HOP, linewidth=0.4)
    if stage.compute_s < _LABELLED_FROM * latency_s:
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


def _row_names(problem: ClusterProblem, stages: tuple[Stage, ...], order: list[int]) -> list[str]:
    held = {stage.device: stage.span for stage in stages}
    names = []
    for device in order:
        span, name = held.get(device), problem.devices[device].name.replace("$", r"\$")
        names.append(f"{name}\n{_blocks(span) if span else 'not used'}")
    return names


def _blocks(span: Span) -> str:
    last = span.stop - 1
    return f"block {last}" if span.blocks == 1 else f"blocks {span.first}-{last}"


def _title(decision: Decision, unit: int, partition: Partition) -> str:
    name = decision.inventory.clusters[unit].name
    sits_out = decision.round is not None and decision.round.of(unit) is None
    how = f"S = {partition.num_segments}, m = {partition.num_micro_batches}"
    if partition.replicated:
        how = "each device trains the whole encoder"
    idle = ", idle in this round" if sits_out else ""
    return f"{name}: {how}, {seconds(partition.latency_s)} a batch{idle}"


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=_SHADES[0], label="odd micro-batch, forward and backward"),
        Patch(facecolor=_SHADES[1], label="even micro-batch"),
        Patch(facecolor=_HOP, label="hop to the next device"),
    ]
