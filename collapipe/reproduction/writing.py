"""A figure's evidence as files: a table, a record of what was found, and the picture twice."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from collapipe import __version__
from collapipe.errors import ConfigError
from collapipe.reproduction.worlds import paper_world
from collapipe.runs.evidence import Evidence

_DPI = 150


def write(name: str, evidence: Evidence, seeds: Sequence[int], folder: Path) -> None:
    """``NAME.csv``, ``.json``, ``.png`` and ``.svg`` in ``folder``; existing ones are replaced.

    Raises ``ConfigError`` where a file cannot be written.
    """
    try:
        (folder / f"{name}.csv").write_text(_table(evidence), encoding="utf-8")
        record = json.dumps(_record(name, evidence, seeds), indent=2, allow_nan=False)
        (folder / f"{name}.json").write_text(f"{record}\n", encoding="utf-8")
        _save(evidence.picture, folder / name)
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: {error.filename} cannot be written ({error.strerror})"
        ) from error


def _table(evidence: Evidence) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(evidence.columns)
    table.writerows(evidence.rows)
    return text.getvalue()


def _record(name: str, evidence: Evidence, seeds: Sequence[int]) -> dict[str, object]:
    return {
        "figure": name,
        "what": evidence.what,
        "interval": "95 %, Student's t over the seeds' means; null with one seed",
        "claims": [asdict(claim) for claim in evidence.claims],
        "findings": [asdict(finding) for finding in evidence.findings],
        "provenance": {
            "collapipe": __version__,
            "command": f"collapipe reproduce {name} --seeds {len(seeds)}",
            "seeds": list(seeds),
            "settings": dict(evidence.settings),
            "presets": paper_world().options,
        },
    }


def _save(picture: Figure, stem: Path) -> None:
    picture.savefig(stem.with_suffix(".png"), dpi=_DPI)
    picture.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
