"""Commands that use the trained model of a run."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from collapipe.cli.options import Json, RunDir, TorchDevice, Trust, Unit
from collapipe.errors import ConfigError


def predict(
    run_dir: RunDir,
    texts: Annotated[
        list[str] | None, Argument(help="Inputs; default: lines of standard input.")
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Inputs are messages in one conversation; print answers.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="Most tokens of a continuation; default: 1, with --chat 256 or fewer."),
    ] = None,
    temperature: Annotated[
        float | None, Option(min=0, help="Draw tokens with it; default: 0, the likeliest one.")
    ] = None,
    top_p: Annotated[
        float | None,
        Option(min=0, max=1, help="Draw only from the likeliest tokens of this probability."),
    ] = None,
    seed: Annotated[int | None, Option(min=0, max=2**63 - 1, help="Of draws; default: 0.")] = None,
    scores: Annotated[bool, Option("--scores", help="Print probabilities after a tab.")] = False,
    as_json: Json = False,
    trust: Trust = None,
    unit: Unit = None,
    torch_device: TorchDevice = None,
) -> None:
    """Use a run's trained model."""
    from collapipe.cli.trained.predict import as_texts, lines_of, predict_texts, typed_lines

    if sys.stdin is None and not texts:
        raise ConfigError("standard input is closed; give TEXTS, or lines through a pipe")
    lines = typed_lines if chat and not texts and sys.stdin.isatty() else lines_of
    predict_texts(
        run_dir,
        [as_texts(texts)] if texts else lines(sys.stdin.buffer),
        trust or [],
        unit,
        chat=chat,
        scores=scores,
        as_json=as_json,
        device=torch_device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


def evaluate(
    run_dir: RunDir,
    file: Annotated[Path, Option(help="Rows with the run's columns: CSV, TSV, JSON or text.")],
    as_json: Json = False,
    trust: Trust = None,
    unit: Unit = None,
    torch_device: TorchDevice = None,
) -> None:
    """Compute the metric of a run's trained model on other rows."""
    from collapipe.cli.trained.predict import evaluate_file

    evaluate_file(run_dir, file, trust or [], unit, as_json, torch_device)


def audit(
    run_dir: RunDir,
    public: Annotated[Path, Option(help="Texts of yours to fit attacks on: lines, CSV, JSON.")],
    rows: Annotated[
        int,
        Option(
            min=1,
            max=10_000,
            help="Validation rows to attack; fewer hardly save time.",
        ),
    ] = 100,
    trust: Trust = None,
    unit: Unit = None,
) -> None:
    """Attack a run's validation rows with what its server had: how much can it read?

    Writes audit.json and audit.png into the run's folder; collapipe report shows them.
    docs/explanation/privacy.md explains the attacks and the figures.
    """
    from collapipe.cli.trained.audit import audit_run

    audit_run(run_dir, public, rows, trust or [], unit)


def export(
    run_dir: RunDir,
    folder: Annotated[Path, Argument(help="A new folder for the model.")],
    adapter: Annotated[
        bool, Option("--adapter", help="Only the adapters, as a folder that peft loads.")
    ] = False,
    trust: Trust = None,
    unit: Unit = None,
) -> None:
    """Write the model of a run with model=huggingface as a folder that transformers loads."""
    from collapipe.cli.trained.export import export_run

    export_run(run_dir, folder, trust or [], unit, adapter)
