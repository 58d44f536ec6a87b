"""Build HTML and SVG; every text is escaped unless it is ``Markup``."""

import html
from collections.abc import Sequence
from importlib.resources import files

from collapipe import __version__

GENERATOR = '<meta name="generator" content="CollaPipe report">'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Markup(str):
    """Text that is already HTML. Only ``tag``, ``join`` and constants in this package make it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element; attributes and children other than ``Markup`` are escaped.

    ``stroke_width=1`` becomes ``stroke-width="1"``, and ``class_`` becomes ``class``. Attributes
    that are None are left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name == "meta":
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*children)}</{name}>")


def join(*parts: object) -> Markup:
    """Join all parts that are not None."""
    there = (each for each in parts if each is not None)
    shown = (each if isinstance(each, Markup) else html.escape(str(each)) for each in there)
    return Markup("".join(shown))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], label: str, *, words: bool = False
) -> Markup:
    """Return a table: names on the left, figures or ``words`` on the right; wide tables scroll."""
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    whole = tag("table", tag("thead", head), tag("tbody", *body), class_="words" if words else None)
    return scrolling(whole, label)


def scrolling(content: Markup, label: str) -> Markup:
    """Return a region with its own scroll bar on narrow pages."""
    return tag("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")


def details(summary: str, *children: object) -> Markup:
    """Return content that is collapsed until the reader opens it."""
    return tag("details", tag("summary", summary), *children)


def note(text: str) -> Markup:
    """Return a note below a chart or a table."""
    return tag("p", text, class_="note")


def charts(*figures: Markup | None) -> Markup:
    """Arrange charts in a row, as many as fit the page's width."""
    return tag("div", *figures, class_="charts")


def whole_page(title: str, opening: Markup, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """Return a self-contained page.

    ``opening`` is above the links to the ``sections``; each has its anchor, its title and its
    content.
    """
    style = Markup(files(__package__).joinpath("style.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        Markup(GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", style),
    )
    links = [tag("li", tag("a", name, href=f"#{place}")) for place, name, _ in sections]
    parts = [
        tag("section", tag("h2", name, id=own), content, id=place, aria_labelledby=own)
        for place, name, content in sections
        for own in [f"{place}-title"]
    ]
    nav = tag("nav", tag("ul", *links), aria_label="Sections")
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#figures", class_="skip"),
        tag("header", tag("h1", title), opening, nav),
        tag("main", *parts, id="figures"),
        tag("footer", tag("p", f"Written by CollaPipe {__version__}.", class_="note")),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'
