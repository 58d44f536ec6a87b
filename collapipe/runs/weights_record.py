"""Write and read a file of trained weights, and verify that the model has not changed since then.

The file's header records the model: digests of the weights, of the tokeniser and of frozen weights,
and the options that determine it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from safetensors import safe_open

from collapipe.config.resolved import flattened
from collapipe.errors import ConfigError, one_line
from collapipe.validation import from_json

if TYPE_CHECKING:  # torch takes seconds to import, and submitting a run does not need it
    from collapipe.tensors import Tensors
    from collapipe.text.tokenizer import Tokenizer

Record = dict[str, dict[str, Any]]  # file in the run's folder → name → its digest or an option
_RECORD, _KEY = TypeAdapter(Record), "collapipe"
# options of model and adapter that do not determine it; folders may be moved
_OTHER = "model.name", "adapter.path", "adapter.cache", "adapter.cache_bytes"
_SHOWN = 40  # characters of a value


def of_weights(name: str, weights: "Tensors") -> Record:
    """Return the record of the weights in the file ``name``."""
    from collapipe.wire.frozen_store import digest

    return {name: {"SHA-256": digest(weights)}}


def of_tokenizer(tokenizer: "Tokenizer") -> Record:
    """Return the record of a tokeniser's two files."""
    texts = {"tokenizer": tokenizer.json_text, "model": json.dumps(tokenizer.described())}
    digests = {each: hashlib.sha256(text.encode()).hexdigest() for each, text in texts.items()}
    return {f"model/{each}.json": {"SHA-256": digest} for each, digest in digests.items()}


def of_options(tree: Mapping[str, Any]) -> Record:
    """Return the record of a run's resolved options that determine its model."""
    options = flattened({group: tree[group] for group in ("model", "adapter")})
    return {"config.yaml": {name: options[name] for name in options.keys() - {*_OTHER}}}


def write(file: Path, weights: "Tensors", record: Record) -> None:
    """Write weights and a record. Raises ``OSError`` or ``SafetensorError``."""
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, file, {_KEY: json.dumps(record, sort_keys=True)})


def read(file: Path) -> "tuple[Tensors, Record]":
    """Return weights and their record, which is empty if an earlier version wrote them. Raises
    ``SafetensorError`` or ``ConfigError`` for an invalid file."""
    with safe_open(file, "pt") as opened:  # once: a run may replace the file meanwhile
        text = (opened.metadata() or {}).get(_KEY, "{}")
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return weights, from_json(_RECORD, file, text, "the record of a run's weights", "; restore it")


def check(run_dir: Path, file: Path, then: Record, now: Record) -> None:
    """Raise ``ConfigError`` if something is not as ``then``, when ``file`` was written."""
    for name, before in then.items():
        after = now.get(name, {})
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                is_, was = (one_line(each.get(key))[:_SHOWN] for each in (after, before))
                way_out = _way_out(run_dir) if file == run_dir / name else "restore the file"
                raise ConfigError(
                    f"{run_dir / name}: {key} is {is_}, was {was} when the run wrote {file.name}; "
                    f"{way_out}"
                )


def _way_out(run_dir: Path) -> str:
    folder = quote(str(run_dir))
    if not (run_dir / "checkpoints" / "latest").exists():
        return "restore the file, or train again"
    return (
        "restore the file, or make it from the last checkpoint: "
        f"rm -f {folder}/summary.json; collapipe resume {folder}"
    )
