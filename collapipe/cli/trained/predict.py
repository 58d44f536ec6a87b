"""``collapipe predict`` and ``evaluate``: apply a run's model to a user's inputs and rows."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from collapipe.config import Settings
from collapipe.errors import ConfigError, faults_of
from collapipe.process.torch_device import moved, torch_device
from collapipe.runs.model import Trained, load_model, load_trained
from collapipe.tasks.evaluation import Prediction, Predictor

if TYPE_CHECKING:  # transformers takes seconds to import
    from collapipe.tasks.generation import Conversation, Generator

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # an untrusted run's labels may contain these
_CONTROL_BUT_LINES = re.compile(rf"(?![\n\t]){_CONTROL.pattern}")
_CHUNK, _LONGEST_LINE = 2**16, 2**22  # bytes


def predict_texts(
    run_dir: Path,
    texts: Iterable[Sequence[str]],
    trusted: Sequence[str],
    unit: int | None = None,
    *,
    chat: bool = False,
    scores: bool = False,
    as_json: bool = False,
    device: str | None = None,
    **decoding: Any,
) -> None:
    """Print a line per text; ``texts`` are batches, and each is printed once it is computed.

    A causal model continues texts; ``decoding`` has fields of ``Decoding``. With ``chat`` it
    answers them as a user's messages in one conversation. On a terminal its text appears in
    pieces. ``trusted`` packages may define the run's task and model. ``unit`` selects a model if
    each unit has one. ``device`` is a torch device; None: the run's.
    """
    trained, scored = load_trained(run_dir, trusted, unit), scores or as_json
    given = {name: value for name, value in decoding.items() if value is not None}
    predictor = _predictor(trained, device, chat, scored, given)
    control = _CONTROL_BUT_LINES if chat else _CONTROL

    def show(piece: str) -> None:
        print(control.sub(" ", piece), end="", flush=True)

    streams = sys.stdout.isatty() and not scored and not isinstance(predictor, Predictor)
    for batch in texts:
        shown = [show] if streams and (chat or len(batch) == 1) else []
        for text, answer in zip(batch, predictor.predict(batch, *shown), strict=True):
            found = {"text": text, "prediction": answer.text, **answer.scores}
            line = "" if shown else control.sub(" ", answer.text) + _scores(answer)
            print(json.dumps(found) if as_json else line, flush=True)


def _predictor(
    trained: Trained, device: str | None, chat: bool, scored: bool, given: Mapping[str, Any]
) -> "Predictor | Generator | Conversation":
    """Return what answers texts. Raises ``ConfigError`` for options that do not fit the model."""
    settings, tokenizer = trained.settings, trained.tokenizer
    where = _device(settings, device)
    if not _continues(settings):
        if chat or given:
            raise ConfigError(
                "--chat, --max-new-tokens, --temperature, --top-p and --seed are for causal models "
                f"of transformers; leave them out with task={settings.task.name}"
            )
        return Predictor(moved(trained.model(), where), settings.task, tokenizer, scored)
    from collapipe.models.huggingface.assembly import assembled
    from collapipe.models.lora import merge_adapters
    from collapipe.tasks.generation import Conversation, Decoding, Generator

    rules = Decoding(**{"max_new_tokens": None if chat else 1, **given})
    if chat and tokenizer.chat_template is None:
        raise ConfigError(
            "--chat: the run's tokeniser has no chat template; train a model that has one, or with "
            "task.chat_template"
        )
    with trained.fitting():
        model = assembled(settings.model, tokenizer.vocabulary, trained.weights)
    merge_adapters(model)  # a layer with adapters takes a fifth longer for a token
    generator = Generator(model.to(where), settings.task, tokenizer, rules, scored)
    return Conversation(generator, tokenizer) if chat else generator


def _continues(settings: Settings) -> bool:
    if "causal" not in settings.task.heads:
        return False
    from collapipe.models.huggingface.assembly import is_of_transformers

    return is_of_transformers(settings.model)


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
    from collapipe.data.files import read_file
    from collapipe.data.sources import columns_of, standard
    from collapipe.tasks.evaluation import Evaluator
    from server_app.records.progress import shown

    settings, model, tokenizer = load_model(run_dir, trusted, unit)
    model = moved(model, _device(settings, device))
    task, names = settings.task, columns_of(settings.data, settings.task.columns)
    rows = standard(read_file(file, "--file", names.values()), names, str(file))
    with faults_of(file):
        found = Evaluator(task, rows, tokenizer).evaluate(model)
    score = found.score
    if as_json:
        values = {score.name: score.value, **score.extra_metrics}
        print(json.dumps({"metrics": values, "loss": found.loss, "signature": score.signature}))
    else:
        print(f"{shown(score)}  loss {found.loss:.4g}  ({score.signature})")


def _device(settings: Settings, name: str | None) -> torch.device:
    """Return the device ``name``, by default ``server.torch_device``."""
    chosen = name or settings.server.torch_device
    return torch_device("--torch-device", chosen, settings.pipeline.dtype)


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
                f"standard input:{number + 1}: a line of more than {_LONGEST_LINE:,} bytes; "
                "split it"
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


def typed_lines(stream: BinaryIO) -> Iterator[list[str]]:
    """Yield ``lines_of`` a terminal that are not blank, each after a prompt."""
    batches = lines_of(stream)
    while True:
        print("> ", end="", flush=True)
        batch = next(batches, None)
        if batch is None:
            print()
            return
        if lines := [line for line in batch if line.strip()]:
            yield lines


def _scores(prediction: Prediction) -> str:
    """Return a tab and the prediction's probability or log probability; empty without scores."""
    scores = prediction.scores
    if not scores:
        return ""
    score = scores.get("probability", scores.get("log_probability"))
    values = score if isinstance(score, list) else [score]
    return f"\t{' '.join(f'{value:.4g}' for value in values)}"
