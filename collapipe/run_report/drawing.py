"""The parts of all charts: inline SVG, written here and not by matplotlib for the sake of the page.
Its style sheet colours them, for dark and light and print, they grow and shrink with it, and they
are a tenth of the size. What differs does so by colour and by form."""

from collections.abc import Iterable

from collapipe.run_report.html import Markup, join, scrolling, tag
from collapipe.run_report.scale import Scale

WIDTH, WIDE = 420.0, 860.0
RIGHT, TOP, BOTTOM = 20.0, 24.0, 40.0
LETTER = 7.4  # width of a letter, at most in the mean
COLOURS = 8


def figure(
    title: str,
    size: tuple[float, float],
    content: Iterable[Markup],
    legend_entries: Iterable[tuple[str, Markup]],
) -> Markup:
    """A chart with its title and legend. A screen reader says the title; wide charts scroll."""
    width, height = size
    box = f"0 0 {width:g} {height:g}"
    drawn = tag("svg", *content, viewBox=box, role="img", aria_label=title)
    wide = width > WIDTH
    return tag(
        "figure",
        tag("figcaption", title),
        scrolling(drawn, title) if wide else drawn,
        legend(legend_entries),
        class_="wide" if wide else None,
    )


def legend(entries: Iterable[tuple[object, Markup]], *, tall: bool = False) -> Markup | None:
    """Names beside samples, one beneath the other where ``tall``; None without entries."""
    items = [tag("li", sample, " ", name) for name, sample in entries]
    return tag("ul", *items, class_="legend tall" if tall else "legend") if items else None


def floor_axis(horizontal: Scale, floor: float, across: str) -> Markup:
    """The horizontal axis at the height ``floor``."""
    left, right = horizontal.begin, horizontal.end
    ticks = "".join(f"M{horizontal.at(tick):.1f} {floor:g}v4" for tick in horizontal.ticks)
    names = [
        text_at(horizontal.at(tick), floor + 17, name, "middle")
        for tick, name in zip(horizontal.ticks, horizontal.names(), strict=True)
    ]
    return join(
        tag("path", d=f"M{left:g} {floor:g}H{right:g}{ticks}", class_="axis"),
        *names,
        text_at((left + right) / 2, floor + 34, fitting(across, right - left), "middle"),
    )


def text_at(x: float, y: float, text: str, anchor: str) -> Markup:
    """A text whose ``anchor`` (``start``, ``middle`` or ``end``) is at x."""
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def fitting(text: str, width: float) -> str:
    """As much of a text as has room."""
    most = max(1, int(width / LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def key(*content: Markup | None) -> Markup:
    """A legend's sample, 28 by 12."""
    return tag("svg", *content, viewBox="0 0 28 12", class_="key", aria_hidden="true")


def colour(style: int) -> str:
    """The class of a style's colour."""
    return f"c{style % COLOURS}"
