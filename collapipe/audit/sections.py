"""Show an audit: sentences, tables with a row per condition, and a picture."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.audit.result import Attack, Audit, Condition, Recovery, Share, State, UpdateRecovery
from collapipe.formatting import counted
from collapipe.process.drawing import own_look
from collapipe.state import Precision

ATTACKS: tuple[Attack, ...] = get_args(Attack)
_PRECISIONS = get_args(Precision)
_BASELINE: Attack = "most frequent"
_SHOWN = [attack for attack in ATTACKS if attack != _BASELINE]
_COLUMNS = ("", *_SHOWN, "rare tokens")  # the last one of the best attack
SENT = {
    "first": "each text's pooled row",
    "labelled": "the rows of labelled tokens",
    "real": "all tokens' rows",
    "every": "all tokens' rows",
}
_GROUPS: dict[str, tuple[str, Callable[[Condition], str]]] = {  # title, name of a row
    "blocks": (
        "By encoder blocks between text and server, all tokens' rows",
        lambda each: counted(each.blocks, "block"),
    ),
    "precision": ("By precision", lambda each: each.precision),
    "noise": ("By Gaussian noise, times a row's norm", lambda each: f"noise {each.noise:g}"),
    "reads": ("By rows", lambda each: SENT[each.reads]),
}
_UPDATE_TITLE = "By what a unit's update tells of a round's rows"
_UPDATE_COLUMNS = (
    *("", "tokens", "rare tokens", "most frequent tokens"),
    *("labels", "labels, by the counts that units report"),
)
_UPDATE_SHARES = "tokens", "rare_tokens", "usual_tokens", "labels", "usual_labels"
_LOOKS = {  # colour and mark
    "most frequent": ("#8c8c8c", ""),
    "nearest": ("#4c97cf", "^"),
    "softmax": ("#2a9d6f", "v"),
    "linear": ("#08306b", "o"),
    "learned": ("#c8641a", "s"),
}
_LINES: dict[State, str] = {"trained": "-", "frozen": "--"}
_PANELS = {
    "blocks": "encoder blocks between text and server",
    "precision": "precision",
    "noise": "noise, times a row's norm",
}


def headline(found: Audit) -> str:
    """Return a sentence about the data that units send."""
    sent = found.sent
    if not found.sends:
        return (
            "The units of this run send no activations, and the server gets none. The tables show "
            "what it would get if heads were on it."
        )
    blocks = counted(sent.blocks, "block")
    return f"The server gets {SENT[sent.reads]} after {blocks}, {sent.precision}."


def baseline(found: Audit) -> str:
    """Return a sentence about the recovery without an attack."""
    shares = {
        SENT[each.condition.reads]: percent(each.all_tokens)
        for each in found.recoveries
        if each.attack == _BASELINE
    }
    texts = (f"{share} % with {reads}" for reads, share in shares.items())
    return f"Guessing the most frequent tokens finds {', '.join(texts)}."


def chosen(found: Audit, field: str) -> list[Recovery]:
    """Return recoveries whose condition differs from the units' only in ``field``.

    The rows read may also be all tokens' rows. Recoveries of initial and trained weights are
    included.
    """
    middle = replace(found.sent, reads="real")
    return [
        each
        for each in found.recoveries
        if replace(each.condition, state=middle.state, **{field: getattr(middle, field)}) == middle
    ]


def recovered(found: Audit, field: str, attack: Attack, state: State) -> list[Recovery]:
    """Return an attack's recoveries of ``chosen``, for weights of this ``state``."""
    every = chosen(found, field)
    return [each for each in every if (each.attack, each.condition.state) == (attack, state)]


def tables(found: Audit) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield title, columns and rows of each table."""
    for field, (title, name) in _GROUPS.items():
        conditions = sorted({each.condition for each in chosen(found, field)}, key=_order)
        if len({getattr(each, field) for each in conditions}) > 1:
            rows = [[f"{c.state}, {name(c)}", *_cells(found, c)] for c in conditions]
            yield title, _COLUMNS, rows
    if found.updates:
        yield _UPDATE_TITLE, _UPDATE_COLUMNS, list(map(_update_row, found.updates))


def _order(each: Condition) -> tuple[str, int, int, float, str]:
    return each.state, each.blocks, _PRECISIONS.index(each.precision), each.noise, each.reads


def _cells(found: Audit, condition: Condition) -> list[str]:
    recovered = {each.attack: each for each in found.of(condition)}
    best = max(recovered.values(), key=lambda each: each.all_tokens.value)
    shares = [recovered[each].all_tokens if each in recovered else None for each in _SHOWN]
    return [*map(percent, shares), percent(best.rare_tokens)]


def percent(share: Share | None) -> str:
    """Return a share in percent with its interval, such as ``87.5 (85–90)``."""
    if share is None:
        return "–"
    value, low, high = (100 * each for each in (share.value, share.low, share.high))
    return f"{value:.1f} ({low:.0f}–{high:.0f})"


def membership_text(found: Audit) -> str:
    """Return a sentence about membership inference by losses."""
    membership = found.membership
    if membership is None:
        return "not measured: the training rows are on their owners' machines alone"
    return (
        f"advantage {percent(membership.advantage)} %, AUC {percent(membership.auc)} %, by the "
        f"loss of {counted(membership.rows, 'row')} of either kind"
    )


def _update_row(each: UpdateRecovery) -> list[str]:
    made, shares = each.condition, (getattr(each, name) for name in _UPDATE_SHARES)
    noise = f", noise {made.noise_multiplier:g}" if made.noise_multiplier else ""
    size = f"{counted(made.steps, 'step')} of {counted(made.rows, 'row')}"
    return [f"{made.state}, {size}, {made.precision}{noise}", *map(percent, shares)]


def updates_text(found: Audit) -> str:
    """Return a sentence about attacks on updates."""
    if not found.updates:
        return (
            "not attacked: no unit sends the embedding or a labels' bias, or these do not train; "
            "other attacks on updates are not tried"
        )
    how = "words whose embeddings moved, and labels by how their bias moved, of rounds of one unit"
    return f"{how}. {found.hidden}".rstrip(". ")


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
        f"What a server could read: {counted(found.tokens, 'token')} of "
        f"{counted(found.rows, 'row')}, all tokens' rows sent, 95 % intervals",
        fontsize=10,
    )
    figure.savefig(file, format="png", dpi=150)


def _panel(axes: Axes, found: Audit, field: str) -> None:
    if field == "precision":
        axes.set_xticks(range(len(_PRECISIONS)), _PRECISIONS, rotation=30)
    for state in _LINES:
        for attack in ATTACKS:
            each = recovered(found, field, attack, state)
            if len(each) > 1 and (attack, state) != (_BASELINE, "trained"):  # equal for all weights
                _draw_curve(axes, each, field)


def _draw_curve(axes: Axes, recoveries: Sequence[Recovery], field: str) -> None:
    attack, state = recoveries[0].attack, recoveries[0].condition.state
    colour, mark = _LOOKS[attack]
    placed = {_place(each.condition, field): each.all_tokens for each in recoveries}
    places, shares = zip(*sorted(placed.items()), strict=True)
    axes.errorbar(
        places,
        [100 * share.value for share in shares],
        [[100 * (s.value - s.low) for s in shares], [100 * (s.high - s.value) for s in shares]],
        label=attack if attack == _BASELINE else f"{attack}, {state}",
        linestyle=":" if attack == _BASELINE else _LINES[state],
        marker=mark,
        color=colour,
        markersize=4,
        capsize=2,
        linewidth=1.2,
    )


def _place(condition: Condition, field: str) -> float:
    value = getattr(condition, field)
    return _PRECISIONS.index(value) if field == "precision" else float(value)
