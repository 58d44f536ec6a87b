"""The model's own ``config.json``: read, checked, and fitted to a run."""

import copy
import difflib
import functools
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collapipe.errors import ConfigError, one_line
from collapipe.models.huggingface.families import FAMILIES, Family
from collapipe.models.huggingface.hub import config_fields
from collapipe.text.tokenizer import Vocabulary

SUPPORTED = f"supported families: {', '.join(FAMILIES)}"


@functools.lru_cache(maxsize=8)  # every part asks for it
def read(name: str | None, kind: str | None = None) -> tuple[Family, Any]:
    """Family and configuration of a hub id or a folder; ``kind`` where it does not tell. Without
    a name those that transformers has for ``kind``.

    Raises ``ConfigError`` in one line that says what is missing and lists the families. Code that
    came with a model is never run.
    """
    if not name:
        if kind is None or kind not in FAMILIES:
            raise ConfigError(
                f"model.name: give a hub id or a folder, or model.family; {SUPPORTED}"
            )
        return FAMILIES[kind], CONFIG_MAPPING[kind]()
    try:
        raw = config_fields(name)
    except (OSError, ValueError) as error:
        cause = one_line(error)
        raise ConfigError(
            f"model.name={name}: neither a folder with a config.json nor a model that the hub "
            f"answers for ({cause}); name a folder, or say model.family without a name; {SUPPORTED}"
        ) from error
    own = raw.get("model_type")
    if own is None and kind is None:
        raise ConfigError(
            f"model.name={name}: its config.json has no model_type; say model.family; {SUPPORTED}"
        )
    if own is not None and kind not in (None, own):
        raise ConfigError(f"model.family={kind}: model.name={name} is a {own}; {SUPPORTED}")
    kind = str(own or kind)
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.name={name}: model_type {kind} cannot be taken apart; {SUPPORTED}"
        )
    family = FAMILIES[kind]
    for size in family.sizes:
        if not isinstance(raw.get(size), int):
            raise ConfigError(
                f"model.name={name}: its config.json, of a {kind}, has no {size}; {SUPPORTED}"
            )
    try:
        return family, CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # huggingface_hub's own kinds among them
        cause = one_line(error)
        raise ConfigError(
            f"model.name={name}: transformers {transformers.__version__} refuses its config.json "
            f"({cause}); {SUPPORTED}"
        ) from error


def change(config: Any, fields: Mapping[str, Any]) -> Any:
    """A copy with other values. Raises ``ConfigError`` for a field or a value that cannot be."""
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, list(config.to_dict()), n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ConfigError(f"model.config.{name}: a {config.model_type} has no such field{hint}")
        try:
            setattr(changed, name, value)
        except Exception as error:  # huggingface_hub's own kinds among them
            raise ConfigError(
                f"model.config.{name}={value}: a {config.model_type} refuses it ({one_line(error)})"
            ) from error
    return changed


def without_layer_drop(config: Any) -> None:
    """Leave no layer out by chance: torch's own generator would decide."""
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)


def use_vocabulary(config: Any, vocabulary: Vocabulary) -> None:
    """A model with fresh weights speaks the task's vocabulary."""
    config.vocab_size = vocabulary.size
    config.pad_token_id, config.bos_token_id = vocabulary.pad, vocabulary.bos
    config.eos_token_id = vocabulary.eos
    if config.is_encoder_decoder:
        config.decoder_start_token_id = vocabulary.bos
        config.forced_bos_token_id = config.forced_eos_token_id = None
    if hasattr(config, "decoder_vocab_size"):
        config.decoder_vocab_size = vocabulary.size
