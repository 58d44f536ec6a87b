"""Draw a traced step: one row per device with computing, waiting and sending, and the plan."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from collapipe.drawing import own_look
from collapipe.errors import ConfigError
from collapipe.run_report.trace import COMPUTE, PLANNED, SEND, SEND_BACK, WAIT, Event

_WIDTH_IN, _ROW_IN, _MARGIN_IN = 9.0, 0.7, 1.3
_LANES = {  # top and height in a row, colour, label
    COMPUTE: (-0.4, 0.34, "#3b6ea5", "computes"),
    WAIT: (-0.4, 0.34, "#dddddd", "waits for its input"),
    SEND: (-0.04, 0.1, "#222222", "sends activations"),
    SEND_BACK: (0.08, 0.1, "#909090", "sends gradients"),
    PLANNED: (0.22, 0.18, "#c98b3a", "the plan"),
}


@own_look()
def draw(events: Iterable[Event], title: str, file: Path) -> None:
    """Draw the last step of ``events``, with the planned step aligned to it.

    Raises ``ConfigError`` if the file cannot be written, or does not end in .svg or .png.
    """
    events = list(events)
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    figure = Figure((_WIDTH_IN, _ROW_IN * len(names) + _MARGIN_IN), layout="constrained")
    axes = figure.subplots()
    for each, begin in _last_step([each for each in events if each["ph"] == "X"]):
        top, height, color, _ = _LANES[each["tid"]]
        lane = list(names).index(each["pid"]) + top, height
        bar = (each["ts"] - begin) / 1e6, each["dur"] / 1e6
        axes.broken_barh([bar], lane, facecolors=color, edgecolors="white", linewidth=0.4)
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names.values()])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("time from the beginning of the step [s]")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patches = [Patch(facecolor=color, label=label) for _, _, color, label in _LANES.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    try:
        figure.savefig(file, dpi=160)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}: {error}; name a .svg or .png file") from error


def _last_step(slices: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Return the slices of the last step and of the plan, each with its start time."""
    begins: dict[int, float] = {}
    for each in slices:
        if each["tid"] == WAIT:  # the first thing in a step
            step = each["args"]["step"]
            begins[step] = min(each["ts"], begins.get(step, math.inf))
    last = max(begins, default=0)
    for each in slices:
        if each["tid"] == PLANNED:
            yield each, begins[0]
        elif each["args"]["step"] == last:
            yield each, begins[last]
