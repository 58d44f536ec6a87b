"""``collapipe predict`` and ``evaluate``: apply a run's model to a user's inputs and rows."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from collapipe.config import Settings
from collapipe.data.files import read_file
from collapipe.data.sources import columns_of, standard
from collapipe.errors import ConfigError
from collapipe.models.split import SplitModel
from collapipe.process.torch_device import torch_device
from collapipe.runs.model import load_model
from collapipe.tasks.evaluation import Evaluator, Prediction, Predictor
from collapipe.text.tokenizer import Tokenizer
from server_app.records.progress import shown

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # an untrusted run's labels may contain these
_CHUNK, _LONGEST_LINE = 2**16, 2**22  # bytes


def predict_texts(
    run_dir: Path,
    texts: Iterable[Sequence[str]],
    trusted: Sequence[str],
    unit: int | None = None,
    *,
    max_new_tokens: int | None = None,
    scores: bool = False,
    as_json: bool = False,
    device: str | None = None,
) -> None:
    """Print a line per text; ``texts`` are batches, and each is printed once it is computed.

    ``trusted`` packages may define the run's task and model. ``unit`` selects a model if each unit
    has one. ``device`` is a torch device; None: the run's.
    """
    settings, model, tokenizer = _load(run_dir, trusted, unit, device)
    scored = scores or as_json
    predictor = Predictor(model, settings.task, tokenizer, max_new_tokens, scored)
    for batch in texts:
        for text, prediction in zip(batch, predictor.predict(batch), strict=True):
            found = {"text": text, "prediction": prediction.text, **prediction.scores}
            print(json.dumps(found) if as_json else _as_line(prediction), flush=True)


def evaluate_file(
    run_dir: Path,
    file: Path,
    trusted: Sequence[str],
    unit: int | None,
    as_json: bool,
    device: str | None = None,
) -> None:
    """Print the metric of the run's model on a file's rows, which have the run's column names.

    Raises ``DataError`` for rows that do not fit the task.
    """
    settings, model, tokenizer = _load(run_dir, trusted, unit, device)
    task, names = settings.task, columns_of(settings.data, settings.task.columns)
    rows = standard(read_file(file, "--file", names.values()), names, str(file))
    found = Evaluator(task, rows, tokenizer).evaluate(model)
    score = found.score
    if as_json:
        values = {score.name: score.value, **score.extra_metrics}
        print(json.dumps({"metrics": values, "loss": found.loss, "signature": score.signature}))
    else:
        print(f"{shown(score)}  loss {found.loss:.4g}  ({score.signature})")


def _load(
    run_dir: Path, trusted: Sequence[str], unit: int | None, device: str | None
) -> tuple[Settings, SplitModel, Tokenizer]:
    """Load a run as ``load_model`` does, to ``device`` or else ``server.torch_device``."""
    settings, model, tokenizer = load_model(run_dir, trusted, unit)
    name = device or settings.server.torch_device
    chosen = torch_device("--torch-device", name, settings.pipeline.dtype)
    return settings, model.to(chosen), tokenizer


def as_texts(arguments: Sequence[str]) -> list[str]:
    """Return the typed texts. Raises ``ConfigError`` for bytes that are not UTF-8."""
    for number, text in enumerate(arguments, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"text {number} is not UTF-8; convert it") from error
    return list(arguments)


def lines_of(stream: BinaryIO) -> Iterator[list[str]]:
    """Yield the lines that have arrived since the last time, until the stream ends.

    Raises ``ConfigError`` for a line that is not UTF-8 or has more than ``_LONGEST_LINE`` bytes.
    """
    rest, number = b"", 0
    while chunk := getattr(stream, "read1", stream.read)(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        yield [_decoded(line, number) for number, line in enumerate(lines, number + 1)]
        number += len(lines)
        if len(rest) > _LONGEST_LINE:
            raise ConfigError(
                f"standard input:{number + 1}: a line of more than {_LONGEST_LINE} bytes"
            )
    if rest:
        yield [_decoded(rest, number + 1)]


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input:{number} is not UTF-8 (byte 0x{error.object[error.start]:02x}); "
            "convert it"
        ) from error


def _as_line(prediction: Prediction) -> str:
    """Return the prediction and, after a tab, its probability or log probability."""
    line, scores = _CONTROL.sub(" ", prediction.text), prediction.scores
    if not scores:
        return line
    score = scores.get("probability", scores.get("log_probability"))
    values = score if isinstance(score, list) else [score]
    return f"{line}\t{' '.join(f'{value:.4g}' for value in values)}"
