"""``collapipe export``: write a run's model in the format of the transformers library."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
from safetensors import SafetensorError
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from collapipe.errors import ConfigError, one_line
from collapipe.models.adapter_folder import write_adapter
from collapipe.models.huggingface.assembly import assembled, is_of_transformers
from collapipe.models.huggingface.families import CLASSES, OF_LABELS
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import kept_as, merge_adapters
from collapipe.models.split import ModelSpec
from collapipe.runs.model import load_trained
from collapipe.tasks.chat import Chat
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import Vocabulary

# Special tokens that the tasks add to an input ($A), by kind of head or task.
_TEMPLATES = {
    "tokens": "{bos} $A {eos}",
    "pooled": "{bos} $A {eos}",
    "causal": "{eos} $A",
    "chat": "$A",  # a causal head, but the chat template writes them
    "decoder": "$A {eos}",
}
# Further special tokens of a pretrained tokeniser, with the families' names for them.
_OTHERS = {"mask_token": ("[MASK]", "<mask>"), "unk_token": ("[UNK]", "<unk>")}


def export(
    spec: ModelSpec,
    vocabulary: Vocabulary,
    labels: Sequence[str],
    weights: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` with the original weight names.

    ``labels`` are the names that a task head predicts. ``weights`` are the split model's; adapters
    are merged. If it has two copies of a weight that the original shares and they differ, both are
    written, and the configuration unties them. Raises ``RuntimeError`` if the weights are not this
    model's.
    """
    model = assembled(spec, vocabulary, weights)
    merge_adapters(model)
    if spec.head in ("tokens", "pooled"):
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {name: number for number, name in enumerate(labels)}
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


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Remove the files in a new or empty folder if the context ends with an error."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for file in [*folder.glob("*")]:
            file.unlink()
        if not existed and folder.exists():
            folder.rmdir()
        raise


def export_tokenizer(tokenizer: Tokenizer, kind: str, max_length: int, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``AutoTokenizer``.

    A text gets the same ids as in the run, special tokens included. ``truncation=True`` truncates
    to ``max_length``, as the run did. With a chat template, typed special tokens are special.
    """
    chat = tokenizer.chat_template
    words, special = tokenizers.Tokenizer.from_str(tokenizer.json_text), tokenizer.special_tokens
    ids, template = words.get_vocab(), _TEMPLATES[kind].format(bos=special.bos, eos=special.eos)
    words.post_processor = TemplateProcessing(
        single=template,
        special_tokens=[(token, ids[token]) for token in dict.fromkeys((special.bos, special.eos))],
    )
    named = {role: name for role, names in _OTHERS.items() for name in names if name in ids}
    if kind in ("tokens", "pooled"):
        named |= {"cls_token": special.bos, "sep_token": special.eos}
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=special.pad,
        bos_token=special.bos,
        eos_token=special.eos,
        split_special_tokens=chat is None,  # a typed "</s>" is text, as in the run
        chat_template=None if chat is None else chat.source,
        model_max_length=max_length,
        **named,
    ).save_pretrained(folder)


def export_run(
    run_dir: Path,
    folder: Path,
    trusted: Sequence[str],
    unit: int | None = None,
    adapter: bool = False,
) -> None:
    """Write model and tokeniser to ``folder``; ``unit`` selects a model if each unit has one.

    With ``adapter`` only trained weights are written, as a folder of peft. Raises ``ConfigError``
    if the run's model cannot be loaded or exported.
    """
    with _writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there already and not empty; name another folder")
    disable_progress_bar()
    trained = load_trained(run_dir, trusted, unit)
    tokenizer, weights, task = trained.tokenizer, trained.weights, trained.settings.task
    spec, vocabulary = trained.settings.model, tokenizer.vocabulary
    if not is_of_transformers(spec):
        raise ConfigError(
            f"{run_dir}: its model is not one of transformers; train with model=huggingface, or "
            f"read {trained.file}"
        )
    how = f'transformers.{CLASSES[str(spec.head)][0]}.from_pretrained("{folder}")'
    with _writing(folder), _whole(folder), trained.fitting():
        if adapter:
            how = how_to_load(write_adapter(spec, vocabulary, weights, folder), vocabulary, folder)
        else:
            export(spec, vocabulary, tokenizer.labels, weights, folder)
            if (kept := kept_as(spec)) is not None:
                print(f"frozen weights, kept in {kept}, are written wide, with the adapters merged")
        kind = "chat" if isinstance(task, Chat) else str(spec.head)
        export_tokenizer(tokenizer, kind, task.max_length, folder)
    print(f"{folder}: load it with {how}")


def how_to_load(base: HuggingFaceSpec, vocabulary: Vocabulary, folder: Path) -> str:
    """Return the Python expression that loads a folder of peft with its base model."""
    labels = f", num_labels={vocabulary.num_labels}" if base.head in OF_LABELS else ""
    whole = f'transformers.{base.class_name}.from_pretrained("{base.name}"{labels})'
    return f'peft.PeftModel.from_pretrained({whole}, "{folder}")'
