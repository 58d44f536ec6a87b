"""What units call their devices is shown as they wrote it, or as a space."""

import io

from rich.console import Console

from server_app.records.progress import end_table


def test_what_looks_like_markup_is_text() -> None:
    shown = io.StringIO()
    Console(file=shown, width=80).print(end_table({"[b]": "2 [/b] + 4 \x1b[31mred\nline"}))
    assert shown.getvalue().split() == ["[b]", "2", "[/b]", "+", "4", "[31mred", "line"]
