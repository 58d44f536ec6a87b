"""What the units hold: rows and labels of each shard, as a table, ``shards.json`` and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from collapipe.config import Settings
from collapipe.runs.folder import RunFolder
from collapipe.runs.rows import load_shards, load_splits
from server_app.records.shard_picture import draw

_SHOWN_UNITS, _SHOWN_LABELS = 12, 3  # in the table


@dataclass(frozen=True, slots=True)
class Shard:
    """How many rows a unit has, and how often each label stands in them."""

    unit: int
    rows: int
    labels: Mapping[str, int]


def write_shard_report(settings: Settings, folder: RunFolder, console: Console) -> None:
    """Print the table; write ``shards.json`` and ``shards.png`` into ``folder``.

    Raises ``DataError`` where the rows do not give a shard for each unit, and ``StorageError``.
    """
    train, cut = load_splits(settings).train, load_shards(settings)
    counts = [settings.task.label_counts(rows) for rows in cut]
    held = [
        Shard(unit, len(rows), count)
        for unit, (rows, count) in enumerate(zip(cut, counts, strict=True))
    ]
    labels = list(settings.task.label_counts(train))
    lines = {"labels": labels, "shards": [asdict(shard) for shard in held]}
    text = json.dumps(lines, indent=2, ensure_ascii=False) + "\n"
    with folder.replacing("shards.json") as file:
        file.write_text(text, encoding="utf-8")
    with folder.replacing("shards.png") as file:
        draw([shard.rows for shard in held], counts, labels, file)
    console.print(_table(held), soft_wrap=True)


def _table(held: Sequence[Shard]) -> Table:
    labelled = any(shard.labels for shard in held)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("unit", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("labels" if labelled else "")
    for shard in held[:_SHOWN_UNITS]:
        table.add_row(str(shard.unit), f"{shard.rows:,}", escape(_most(shard.labels)))
    if len(held) > _SHOWN_UNITS:
        table.add_row("…", "", f"{len(held) - _SHOWN_UNITS} more units, see shards.json")
    return table


def _most(labels: Mapping[str, int]) -> str:
    """The most frequent labels first, such as ``sports 412 · car 260 · 3 more``."""
    there = sorted((-count, name) for name, count in labels.items() if count)
    told = [f"{name} {-count:,}" for count, name in there[:_SHOWN_LABELS]]
    rest = len(there) - len(told)
    return " · ".join([*told, *([f"{rest} more"] if rest else [])])
