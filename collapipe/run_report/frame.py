"""The frame of every page: one file that needs no other."""

from collections.abc import Sequence
from importlib.resources import files

from collapipe import __version__
from collapipe.run_report.html import Markup, tag

GENERATOR = '<meta name="generator" content="CollaPipe report">'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
Section = tuple[str, str, Markup]  # name within the page, title, content


def whole_page(title: str, opening: Markup, sections: Sequence[Section]) -> str:
    """A whole file; ``opening`` stands above the links to the ``sections``."""
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
        tag(
            "section",
            tag("h2", name, id=f"{place}-title"),
            content,
            id=place,
            aria_labelledby=f"{place}-title",
        )
        for place, name, content in sections
    ]
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#figures", class_="skip"),
        tag(
            "header",
            tag("h1", title),
            opening,
            tag("nav", tag("ul", *links), aria_label="Sections"),
        ),
        tag("main", *parts, id="figures"),
        tag("footer", tag("p", f"Written by CollaPipe {__version__}.", class_="note")),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'
