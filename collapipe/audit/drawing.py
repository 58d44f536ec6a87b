"""Draw an audit: recovered tokens by blocks, by precision and by noise."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.audit.result import Audit, Recovery
from collapipe.audit.sections import ATTACKS, chosen
from collapipe.drawing import own_look
from collapipe.state import Precision

_COLOURS = {
    "most frequent": "#8c8c8c",
    "nearest": "#4c97cf",
    "softmax": "#2a9d6f",
    "linear": "#08306b",
    "learned": "#c8641a",
}
_MARKS = {"most frequent": "", "nearest": "^", "softmax": "v", "linear": "o", "learned": "s"}
_LINES = {"trained": "-", "frozen": "--"}
_PANELS = {
    "blocks": "encoder blocks between text and server",
    "precision": "precision",
    "noise": "noise, times a row's norm",
}


@own_look()
def draw(found: Audit, file: Path) -> None:
    """Write the picture as a PNG. Raises ``OSError`` if that fails."""
    figure = Figure((9.5, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True, width_ratios=(4, 3, 3))
    for axes, (field, across) in zip(panels, _PANELS.items(), strict=True):
        _panel(axes, found, field)
        axes.set_xlabel(across)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="private tokens recovered, %", ylim=(-3, 103))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"What a server could read: {found.tokens:,} tokens of {found.rows} rows, all tokens' rows "
        "sent, 95 % intervals",
        fontsize=10,
    )
    figure.savefig(file, format="png", dpi=150)


def _panel(axes: Axes, found: Audit, field: str) -> None:
    recoveries = chosen(found, field)
    values = get_args(Precision)
    if field == "precision":
        axes.set_xticks(range(len(values)), values, rotation=30)
    for state, line in _LINES.items():
        for attack in ATTACKS:
            each = [r for r in recoveries if (r.condition.state, r.attack) == (state, attack)]
            each.sort(key=lambda recovery: _place(recovery, field))
            if len(each) < 2 or (attack == "most frequent" and state == "trained"):
                continue  # it is the same of all weights
            name = attack if attack == "most frequent" else f"{attack}, {state}"
            _curve(axes, [_place(r, field) for r in each], each, name, line)


def _curve(
    axes: Axes, places: Sequence[float], recoveries: Sequence[Recovery], name: str, line: str
) -> None:
    attack, shares = recoveries[0].attack, [each.all_tokens for each in recoveries]
    below = [100 * (share.value - share.low) for share in shares]
    above = [100 * (share.high - share.value) for share in shares]
    axes.errorbar(
        places,
        [100 * share.value for share in shares],
        [below, above],
        label=name,
        linestyle=":" if attack == "most frequent" else line,
        marker=_MARKS[attack],
        color=_COLOURS[attack],
        markersize=4,
        capsize=2,
        linewidth=1.2,
    )


def _place(recovery: Recovery, field: str) -> float:
    if field == "precision":
        return get_args(Precision).index(recovery.condition.precision)
    return float(getattr(recovery.condition, field))
