"""A trained split model as a folder that ``from_pretrained`` of transformers loads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import Tensor

from collapipe.errors import ConfigError, one_line
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.text.tokenizer import Vocabulary


def export(
    spec: HuggingFaceSpec,
    vocabulary: Vocabulary,
    labels: Sequence[str],
    weights: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the original's own names.

    ``labels`` are the names that a task head predicts, ``weights`` those of the split model. Where
    it has two copies of what the original shares, the folder has both, and its configuration says
    so. Raises ``ConfigError`` for a folder that holds something.
    """
    check_folder(folder)
    model = _whole(spec, vocabulary)
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
    with writing(folder):
        model.save_pretrained(folder)


def check_folder(folder: Path) -> None:
    """Make ``folder``. Raise ``ConfigError`` where it holds something, or cannot be written."""
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there already and not empty; name another folder")
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make a ``ConfigError`` of what hinders writing there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: cannot be written ({one_line(error)}); make room or name another folder"
        ) from error


def _whole(spec: HuggingFaceSpec, vocabulary: Vocabulary) -> Any:
    config = spec.run_config(vocabulary)
    if spec.untied():
        config.tie_word_embeddings = False
    return getattr(transformers, spec.class_name).from_config(config)
