"""``collapipe export``: write a run's model in the format of the transformers library."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import transformers
from safetensors import SafetensorError
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from collapipe.errors import ConfigError, one_line
from collapipe.models.cut import CutSpec, uncut
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, merged
from collapipe.models.stem import StemSpec, without_stem
from collapipe.runs.model import load_model
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import Vocabulary

# Special tokens that the tasks add to an input ($A), by kind of head.
_TEMPLATES = {
    "tokens": "{bos} $A {eos}",
    "pooled": "{bos} $A {eos}",
    "causal": "{eos} $A",
    "decoder": "$A {eos}",
}
# Further special tokens of a pretrained tokeniser, with the families' names for them.
_OTHERS = {"mask_token": ("[MASK]", "<mask>"), "unk_token": ("[UNK]", "<unk>")}


def export(
    spec: HuggingFaceSpec,
    vocabulary: Vocabulary,
    labels: Sequence[str],
    weights: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` with the original weight names.

    ``labels`` are the names that a task head predicts. ``weights`` are the split model's. If it has
    two copies of a weight that the original shares, both are written, and the configuration unties
    them. Raises ``ConfigError`` if the weights are not this model's.
    """
    config = spec.run_config(vocabulary)
    if spec.untied():
        config.tie_word_embeddings = False
    model = getattr(transformers, spec.class_name).from_config(config)
    if spec.head in ("tokens", "pooled"):
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {name: number for number, name in enumerate(labels)}
    values = {spec.names.to_original(ours): weight for ours, weight in weights.items()}
    values |= {twin: values[name] for twin, name in spec.copies(vocabulary).items()}
    model.to(next(iter(weights.values())).dtype)
    missing, unexpected = model.load_state_dict(values, strict=False)
    constants = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    if unexpected or set(missing) - constants:
        raise ConfigError(f"not the weights of this model: {[*missing, *unexpected][0]}")
    model.save_pretrained(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Convert errors of writing to ``folder`` into ``ConfigError``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: cannot be written ({one_line(error)}); make room or name another folder"
        ) from error


def export_tokenizer(tokenizer: Tokenizer, head: str, max_length: int, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``AutoTokenizer``.

    A text gets the same ids as in the run, special tokens included. ``truncation=True`` truncates
    to ``max_length``, as the run did.
    """
    words, special = tokenizers.Tokenizer.from_str(tokenizer.json_text), tokenizer.special_tokens
    ids, template = words.get_vocab(), _TEMPLATES[head].format(bos=special.bos, eos=special.eos)
    words.post_processor = TemplateProcessing(
        single=template,
        special_tokens=[(token, ids[token]) for token in dict.fromkeys((special.bos, special.eos))],
    )
    named = {kind: name for kind, names in _OTHERS.items() for name in names if name in ids}
    if head in ("tokens", "pooled"):
        named |= {"cls_token": special.bos, "sep_token": special.eos}
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=special.pad,
        bos_token=special.bos,
        eos_token=special.eos,
        split_special_tokens=True,  # a typed "</s>" is text, as in the run
        model_max_length=max_length,
        **named,
    ).save_pretrained(folder)


def export_run(
    run_dir: Path, folder: Path, trusted: Sequence[str], unit: int | None = None
) -> None:
    """Write model and tokeniser to ``folder``; ``unit`` selects a model if each unit has one.

    Raises ``ConfigError`` if the run's model cannot be loaded or exported.
    """
    with _writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there already and not empty; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
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
    with _writing(folder):
        export(spec, tokenizer.vocabulary, tokenizer.labels, weights, folder)
        export_tokenizer(tokenizer, spec.head, settings.task.max_length, folder)
    print(f'{folder}: load it with transformers.{spec.class_name}.from_pretrained("{folder}")')
