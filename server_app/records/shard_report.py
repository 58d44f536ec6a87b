"""Report the rows and labels of each unit's shard: a table, ``shards.json`` and a picture."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from collapipe.errors import StorageError, one_line
from collapipe.runs.folder import RunFolder
from collapipe.runs.reading import read_shards
from collapipe.state import ClusterState
from collapipe.wire.messages import RowsReply

_FILE = "shards.json"
_SHOWN_UNITS, _SHOWN_LABELS = 12, 3  # in the table
_log = logging.getLogger(__name__)


def write_shard_report(
    replies: Mapping[int, RowsReply], labels: Sequence[str], folder: RunFolder, console: Console
) -> None:
    """Print the table of the units' ``replies``; write ``shards.json`` and ``shards.png`` into
    ``folder``. The file keeps units of an earlier part of the run that have not replied. ``labels``
    are the run's, in the order of their ids. Raises ``StorageError`` if a file cannot be written,
    and ``ConfigError`` if the earlier one is invalid."""
    held: list[dict[str, Any]] = [
        {"unit": unit, "rows": each.num_rows, "labels": dict(each.labels)} | _named(each.name)
        for unit, each in replies.items()
    ]
    earlier = (each for each in read_shards(folder.path).shards if each.unit not in replies)
    held += [{"labels": {}} | each.model_dump(exclude_defaults=True) for each in earlier]
    _write(folder, {"labels": [*labels], "shards": sorted(held, key=lambda each: each["unit"])})
    names = [f"{each.name} {unit}".lstrip() for unit, each in replies.items()]
    sizes = [each.num_rows for each in replies.values()]
    counts = [each.labels for each in replies.values()]
    try:
        from server_app.records import shard_picture  # and with it Matplotlib

        with folder.replacing("shards.png") as file:
            shard_picture.draw(names, sizes, counts, labels, file)
    except StorageError:
        raise
    except Exception as error:  # Matplotlib depends on the user's settings and fonts
        _log.warning("shards.png: not drawn (%s)", one_line(error))
    columns = Column("unit", justify="right"), Column("rows", justify="right")
    last = "labels" if any(counts) else ""
    table = Table(*columns, last, box=None, padding=(0, 2, 0, 0), header_style="")
    for name, size, count in [*zip(names, sizes, counts, strict=True)][:_SHOWN_UNITS]:
        table.add_row(escape(name), f"{size:,}", escape(_most(count)))
    if len(sizes) > _SHOWN_UNITS:
        table.add_row("…", "", f"{len(sizes) - _SHOWN_UNITS} more units, see shards.json")
    console.print(table, soft_wrap=True)


def add_shard(folder: RunFolder, state: ClusterState, name: str, joined: int | None) -> None:
    """Write a unit's rows to ``shards.json``, and its first round if it ``joined`` during the run.
    Its labels are not known, because it was not asked for them."""
    held = json.loads((folder.path / _FILE).read_text(encoding="utf-8"))
    added = {"unit": state.unit, "rows": state.num_samples, "labels": {}}
    added |= {} if joined is None else {"joined": joined}
    kept = [each for each in held["shards"] if each["unit"] != state.unit]
    shards = sorted([*kept, added | _named(name)], key=lambda each: each["unit"])
    _write(folder, {**held, "shards": shards})


def _write(folder: RunFolder, held: Mapping[str, Any]) -> None:
    text = json.dumps(held, indent=2, ensure_ascii=False) + "\n"
    with folder.replacing(_FILE) as file:
        file.write_text(text, encoding="utf-8")


def _named(name: str) -> dict[str, str]:
    return {"name": name} if name else {}


def _most(labels: Mapping[str, int]) -> str:
    """The most frequent labels first, such as ``sports 412 · car 260 · 3 more``."""
    there = sorted((-count, name) for name, count in labels.items() if count)
    named = [f"{name} {-count:,}" for count, name in there[:_SHOWN_LABELS]]
    rest = len(there) - len(named)
    return " · ".join([*named, *([f"{rest} more"] if rest else [])])
