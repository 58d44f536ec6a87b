"""``collapipe export``: a run's model in the format of the transformers library."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from collapipe.errors import ConfigError
from collapipe.models.huggingface.export import check_folder, export
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.run_folder import load_model
from collapipe.tasks.tokenizer import BOS, EOS, PAD


def export_run(run_dir: Path, folder: Path, trusted: Sequence[str]) -> None:
    """Write model and tokeniser to ``folder``; raises ``ConfigError`` where that cannot be."""
    check_folder(folder)
    settings, model, tokenizer = load_model(run_dir, trusted)
    spec: object = settings.model
    if not isinstance(spec, HuggingFaceSpec):
        raise ConfigError(f"{run_dir}: its model is not one of transformers (model=huggingface)")
    export(spec, tokenizer.vocabulary, model.state_dict(), folder)
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(run_dir / "model" / "tokenizer.json"),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
    )
    words.save_pretrained(folder)
    print(f'{folder}: load it with transformers.{spec.class_name}.from_pretrained("{folder}")')
