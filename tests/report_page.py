"""Parses a report's page."""

from html.parser import HTMLParser

_VOID = {"meta"}


class Page(HTMLParser):
    """Elements, texts and table cells of a page; fails unless elements are nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source, self.open = text, list[str]()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []  # of each row of each table
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def figure(self, title: str) -> str:
        """Return the source of the chart with this title."""
        start = self.source.index(f'aria-label="{title}"')
        return self.source[start : self.source.index("</figure>", start)]

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def rows(self, first: str) -> list[list[str]]:
        return [row for row in self.cells if row and row[0] == first]
