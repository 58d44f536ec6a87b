"""``collapipe export``: write a run's model in the format of the transformers library."""

from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from collapipe.errors import ConfigError
from collapipe.models.cut import CutSpec, uncut
from collapipe.models.huggingface.export import check_folder, export, export_tokenizer, writing
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, merged
from collapipe.models.stem import StemSpec, without_stem
from collapipe.runs.model import load_model


def export_run(
    run_dir: Path, folder: Path, trusted: Sequence[str], unit: int | None = None
) -> None:
    """Write model and tokeniser to ``folder``; ``unit`` selects a model if each unit has one.

    Raises ``ConfigError`` if the run's model cannot be loaded or exported.
    """
    check_folder(folder)
    disable_progress_bar()
    settings, model, tokenizer = load_model(run_dir, trusted, unit)
    spec: object = settings.model
    weights = model.state_dict()
    if isinstance(spec, CutSpec):
        spec, weights = spec.base, uncut(weights)
    if isinstance(spec, StemSpec):
        weights = without_stem(weights, spec.frozen_blocks)
        spec = spec.base
    if isinstance(spec, LoraSpec):
        weights = merged(spec, tokenizer.vocabulary, weights)
        spec = spec.base
    if not isinstance(spec, HuggingFaceSpec):
        raise ConfigError(f"{run_dir}: its model is not one of transformers (model=huggingface)")
    assert spec.head is not None
    export(spec, tokenizer.vocabulary, tokenizer.labels, weights, folder)
    with writing(folder):
        export_tokenizer(tokenizer, spec.head, settings.task.max_length, folder)
    print(f'{folder}: load it with transformers.{spec.class_name}.from_pretrained("{folder}")')
