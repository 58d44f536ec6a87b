"""MkDocs hook: reference pages from the command line and ``conf/``, and a site that loads nothing
from other hosts."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//|url\(\"?http"
)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace each mark ``<!-- generated: NAME -->`` by what it names."""
    made = {"commands": commands, "options": options}
    return _MARK.sub(lambda mark: "\n".join(made[mark[1]]()), markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse pages that load a script, a style or a picture from another host."""
    for page in [*Path(config.site_dir).rglob("*.html"), *Path(config.site_dir).rglob("*.svg")]:
        if found := _LOADED.search(page.read_text()):
            raise PluginError(f"{page.name} loads from another host: {found[0]}")


def commands() -> Iterator[str]:
    """A section for each command, from its own help."""
    from collapipe.cli.app import app

    yield from _command(typer.main.get_command(app), "collapipe", None)


def _command(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=name.split()[-1], parent=parent)
    yield f"\n{'##' if name.count(' ') < 2 else '###'} `{name}`\n"
    yield (command.help or "").replace("\b", "")
    yield f"\n```\n{' '.join([name, *command.collect_usage_pieces(context)])}\n```\n"
    rows = [row for each in command.params if (row := _row(each, context))]
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield from rows
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _command(found, f"{name} {each}", context)


def _row(parameter: click.Parameter, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return ""
    name, meaning = (re.sub(r"\s+", " ", text).replace("|", "\\|") for text in record)
    return f"| `{name}` | {meaning} |"


def options() -> Iterator[str]:
    """Each file of ``conf/`` as it stands: names, defaults and comments."""
    yield from _file(ROOT / "conf/config.yaml", "What is in no group")
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        yield f"\n## `{group.name}`\n"
        for file in sorted(group.glob("*.yaml")):
            yield from _file(file, f"`{group.name}={file.stem}`")


def _file(file: Path, title: str) -> Iterator[str]:
    yield f"\n### {title}\n\n```yaml\n{file.read_text().rstrip()}\n```\n"
