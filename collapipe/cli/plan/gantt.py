"""An inventory's pipelines as Gantt charts with one row per device.

In a joint round all clusters share one time axis. Scheduled clusters have further rows for the
upload, the head and the transfer of gradients, each only if it takes time.
"""

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from collapipe.formatting import block_range, counted, seconds
from collapipe.inventory.planned import InventoryPlan, PlannedCluster
from collapipe.process.drawing import name_rows, own_look, save_plot
from optim.timeline import SegmentTimes, StageTimes

_WIDTH_IN, _ROW_IN, _MARGIN_IN, _LEGEND_IN = 9.0, 0.42, 0.8, 0.6
_TITLE_LETTERS = 100  # of a line, else a long name of a cluster is cut
_LABELLED_FROM = 0.017  # share of the axis from which a bar has room for its number
_SHADES, _HOPS = ("#3b6ea5", "#a9c6e3"), ("#222222", "#909090")  # also distinct in grey
_UPLOAD, _SYNC = "#c98b3a", "#7f7f7f"
_NUMBERS = ("white", "black")
_LEGEND = (
    (_SHADES[0], "odd micro-batch, forward and backward"),
    (_SHADES[1], "even micro-batch"),
    (_HOPS[0], "hop to the next device, or back to the control unit"),
    (_UPLOAD, "upload: activations, then the model"),  # in a joint round
)
_LATER_COLORS = {"head": "#6d9b5a", "gradients": "#8a6bb0"}
_BAR, _HOP_BAR = 0.56, 0.14  # of a row's height


_Row = tuple[str, str, list[tuple[float, float]]]
"""A row's name, its colour, and start and length of each bar in seconds."""


@own_look({"svg.hashsalt": "collapipe"})  # the same plan makes the same file
def draw(plan: InventoryPlan, file: Path) -> None:
    """Write the chart as SVG or PNG, depending on the file's suffix.

    Raises ``ConfigError`` if the file cannot be written.
    """
    clusters, joint = plan.clusters, plan.round is not None
    rows = [len(each.cluster.devices) + len(_later_rows(each)) for each in clusters]
    height = _ROW_IN * sum(rows) + _MARGIN_IN * len(rows) + _LEGEND_IN
    figure = Figure((_WIDTH_IN, height), layout="constrained")
    all_axes = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
    latest = max(each.total_s for each in clusters)
    for axes, each in zip(all_axes, clusters, strict=True):
        _draw_cluster(axes, each, latest if joint else each.total_s, joint)
    patches = [Patch(facecolor=color, label=label) for color, label in _LEGEND[: 3 + joint]]
    if any(segment.rows for each in clusters for segment in each.segments):
        patches.append(Patch(facecolor=_SYNC, label="adding the gradients of a shared stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    save_plot(figure, file)


def _draw_cluster(axes: Axes, planned: PlannedCluster, until_s: float, joint: bool) -> None:
    held = {each.device: each for each in planned.segments}
    for row, each in enumerate(planned.segments):
        _draw_segment(axes, each, row, until_s)
    devices = planned.problem.devices
    names = [f"{devices[k].name}\n{_blocks(held.get(k))}" for k in planned.order]
    for name, color, bars in _later_rows(planned):
        top = len(names) - (_BAR + _HOP_BAR) / 2
        axes.broken_barh(bars, (top, _BAR), facecolors=color, edgecolors="white", linewidth=0.4)
        names.append(name)
    name_rows(axes, names, _title(planned, joint))
    axes.set_xlim(0, until_s)
    axes.set_xlabel("time from the beginning of a batch [s]")


def _later_rows(planned: PlannedCluster) -> list[_Row]:
    """Return the rows of the stages after the encoder: uploads in a joint round, the head."""
    stages, found = {each.name: each for each in planned.later_stages}, list[_Row]()
    if allocation := planned.allocation:
        model_s = allocation.upload_s - planned.activation_s
        uplink: list[tuple[float, float]] = [(allocation.finish_s - model_s, model_s)]
        if planned.activation_s:
            uplink = [*_bars(stages.pop("uplink")), *uplink]
        found.append((f"upload\nchannel {allocation.channel}", _UPLOAD, uplink))
    return found + [(name, _LATER_COLORS[name], _bars(each)) for name, each in stages.items()]


def _bars(stage: StageTimes) -> list[tuple[float, float]]:
    return [(start, stage.each_s) for start in stage.starts]


def _draw_segment(axes: Axes, segment: SegmentTimes, row: int, until_s: float) -> None:
    top = row - (_BAR + _HOP_BAR) / 2
    computes = [(start, segment.compute_s) for start in segment.computes]
    hops = [(start, segment.hop_s) for start in segment.hops]
    shades, greys = ([pair[n % 2] for n in range(len(hops))] for pair in (_SHADES, _HOPS))
    axes.broken_barh(computes, (top, _BAR), facecolors=shades, linewidth=0)
    axes.broken_barh(
        hops, (top + _BAR, _HOP_BAR), facecolors=greys, edgecolors=greys, linewidth=0.4
    )
    axes.broken_barh([segment.sync], (top, _BAR), facecolors=_SYNC, linewidth=0)
    if segment.compute_s < _LABELLED_FROM * until_s:
        return
    for number, start in enumerate(segment.computes):
        middle, colour = (start + segment.compute_s / 2, top + _BAR / 2), _NUMBERS[number % 2]
        axes.text(*middle, str(number + 1), color=colour, fontsize=7, ha="center", va="center")


def _blocks(segment: SegmentTimes | None) -> str:
    if segment is None:
        return "not used"
    rows = "" if segment.rows is None else f", {counted(segment.rows, 'row')}"
    return f"block{'s' if segment.span.blocks > 1 else ''} {block_range(segment.span)}{rows}"


def _title(planned: PlannedCluster, joint: bool) -> str:
    partition, allocation = planned.partition, planned.allocation
    how = f"S = {partition.num_segments}, m = {partition.num_micro_batches}"
    if partition.replicated:
        how = "each device trains the whole encoder"
    upload = ""
    if allocation:
        upload = f", upload {seconds(allocation.upload_s)}, all in {seconds(allocation.finish_s)}"
    idle = ", idle in this round" if joint and not allocation else ""
    name, batch = planned.cluster.name, seconds(partition.latency_s)
    return textwrap.fill(f"{name}: {how}, {batch} a batch{upload}{idle}", _TITLE_LETTERS)
