"""Read and check a model's ``config.json``, and adapt it to a run.

The hub gets one request with a short timeout. If it does not answer, the cache is used.
"""

import copy
import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from collapipe.errors import ConfigError, one_line
from collapipe.hub import hub_silence
from collapipe.models.huggingface.families import DECODERS, FAMILIES, UNFIT
from collapipe.text.vocabulary import Vocabulary
from collapipe.validation import nearest

_CONFIG, _GENERATION, _EOS = "config.json", "generation_config.json", "eos_token_id"
_OFF = {
    # torch's own generator would decide which layers to drop and how experts are chosen
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise"), 0.0),
    "output_router_logits": False,  # the loss that balances experts needs all layers
}
_OF_LAYERS = "layer_types", "mlp_layer_types", "num_attention_heads_per_layer"  # a kind for each
SUPPORTED = (
    f"supported families: {', '.join(name for name in FAMILIES if name not in DECODERS)}, and "
    f"{len(DECODERS)} decoder-only ones such as llama, qwen3, gemma2 and mistral"
)


def read(name: str | None, kind: str | None = None) -> Any:
    """Return the configuration of a hub id or a folder, or without a name the default of ``kind``.

    ``kind`` names the family if the configuration does not. Code that comes with a model is never
    run. Raises ``ConfigError`` with one line that names the missing value and lists the families.
    """
    states = list[tuple[int, int]]()
    for file in (_CONFIG, _GENERATION) if name else ():
        with suppress(OSError, ValueError):  # it is no folder, or lacks the file
            found = Path(str(name), file).stat()
            states.append((found.st_mtime_ns, found.st_size))
    return _read(name, kind, tuple(states))


@functools.lru_cache(maxsize=8)  # every part asks for it
def _read(name: str | None, kind: str | None, states: tuple[tuple[int, int], ...]) -> Any:
    """Return what ``read`` does; ``states`` are those of a folder's files."""
    if not name:
        if kind is None:
            raise _refusal("model.name: give a hub id or a folder, or model.family")
        if kind not in FAMILIES:
            raise _refusal(f"model.family={kind}: cannot be taken apart ({_why_not(kind)})")
        return CONFIG_MAPPING[kind]()
    where = f"model.name={name}: "
    try:
        raw = config_fields(name)
    except (OSError, ValueError) as error:
        raise _refusal(
            f"{where}must be a folder with a config.json or a model on the hub "
            f"({one_line(error)}); name a folder, or set model.family without a name"
        ) from error
    own = raw.get("model_type")
    if own is None and kind is None:
        raise _refusal(f"{where}its config.json has no model_type; set model.family")
    if own is not None and kind not in (None, own):
        raise _refusal(f"model.family={kind}: model.name={name} is a {own}")
    kind = str(own or kind)
    if kind not in FAMILIES:
        raise _refusal(f"{where}model_type {kind} cannot be taken apart ({_why_not(kind)})")
    for size in (*FAMILIES[kind].sizes, "vocab_size"):
        if not isinstance(raw.get(size), int):
            raise _refusal(f"{where}its config.json, of a {kind}, has no {size}")
    try:
        return CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # huggingface_hub's own kinds among them
        raise _refusal(
            f"{where}transformers {transformers.__version__} refuses its config.json "
            f"({one_line(error)})"
        ) from error


@functools.lru_cache(maxsize=8)
def portable_fields(kind: str) -> dict[str, Any]:
    """Return the fields of a family's configuration and their defaults in transformers.

    Names, versions and code locations are left out.
    """
    own = CONFIG_MAPPING[kind]().to_dict()
    about = "architectures", "auto_map", "dtype", "model_type", "transformers_version"
    return {name: value for name, value in own.items() if name not in about and name[0] != "_"}


def check_portable(kind: str, fields: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for fields or values that ``portable_fields`` cannot have."""
    known = portable_fields(kind)
    for name, value in fields.items():
        if name not in known or not isinstance(value, str | int | float | list | dict | None):
            raise ConfigError(
                f"model.config.{name[:40]}: a {kind} has no such field or value; remove it"
            )


def _why_not(kind: str) -> str:
    if kind not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} does not know it"
    if "text_config" in CONFIG_MAPPING[kind].sub_configs:
        return "it reads more than text"
    return UNFIT.get(kind, "its parts were never compared with the whole model")


def _refusal(message: str) -> ConfigError:
    return ConfigError(f"{message}; {SUPPORTED}")


def change(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy with other values. Raises ``ConfigError`` for an unknown field or bad value."""
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        if not hasattr(config, name):
            hint = nearest(name, config.to_dict())
            raise ConfigError(f"model.config.{name}: a {config.model_type} has no such field{hint}")
        try:
            setattr(changed, name, value)
        except Exception as error:  # huggingface_hub's own kinds among them
            raise ConfigError(
                f"model.config.{name}={value}: a {config.model_type} refuses it ({one_line(error)})"
            ) from error
    kinds = getattr(changed, "layer_types", None)
    if kinds and "layer_types" not in fields and len(kinds) < changed.num_hidden_layers:
        rest = {name: value for name, value in changed.to_dict().items() if name != "layer_types"}
        changed = type(changed).from_dict(rest)  # with kinds for the new layers
    return changed


def keep_to_blocks(config: Any, num_blocks: int | None, called: str) -> None:
    """Switch off what a split model cannot do, and leave an encoder's first ``num_blocks`` layers.

    Lists of layers' kinds are cut to the model's layers: transformers refuses to save longer ones.
    Raises ``ConfigError``, which names the model as ``called``, if positions cannot be split.
    """
    for name, off in _OFF.items():
        if hasattr(config, name):
            setattr(config, name, off)
    if "dynamic" in json.dumps(getattr(config, "rope_parameters", None) or {}):
        raise ConfigError(
            f"{called}: positions of type dynamic depend on earlier samples; set another rope_type "
            "in model.config or config.json"
        )
    family = FAMILIES[config.model_type]
    if "causal" not in family.heads:  # a causal head has the layers after the blocks
        setattr(config, family.sizes[0], num_blocks)
    layers = getattr(config, family.sizes[0])
    for name in _OF_LAYERS:
        if len(kinds := getattr(config, name, None) or ()) > layers:
            setattr(config, name, kinds[:layers])
    if not getattr(config, "scale_decoder_outputs", True):  # T5 1.1 has untied weights,
        config.tie_word_embeddings = False  # but transformers would tie them


def set_labels(config: Any, vocabulary: Vocabulary, head: str) -> None:
    """Set the number of labels. Raises ``ConfigError`` if there are fewer than two."""
    if vocabulary.num_labels < 2:
        raise ConfigError(
            f"model.head={head}: predicts one of two labels or more, the training rows have "
            f"{vocabulary.num_labels}; correct the column of labels, or take other rows"
        )
    config.num_labels = vocabulary.num_labels


def check_knows(config: Any, vocabulary: Vocabulary, called: str) -> None:
    """Raise ``ConfigError`` if pretrained weights lack tokens of the vocabulary, or a decoder's
    first one."""
    if vocabulary.size > config.vocab_size:
        raise ConfigError(
            f"{called}: knows {config.vocab_size} tokens, the run's tokeniser has "
            f"{vocabulary.size}; use the model's own as it was published, resize the model's "
            "embedding (resize_token_embeddings), or set model.pretrained=false"
        )
    start = getattr(config, "decoder_start_token_id", None)
    if config.is_encoder_decoder and (start is None or not 0 <= start < config.vocab_size):
        raise ConfigError(
            f"{called}: its config.json has decoder_start_token_id={start}, expected one of "
            f"{config.vocab_size} tokens; set it there"
        )


def fit(config: Any, vocabulary: Vocabulary) -> None:
    """Set the task's vocabulary in the configuration of a model with fresh weights."""
    config.vocab_size, config.pad_token_id = vocabulary.size, vocabulary.pad
    config.bos_token_id, config.eos_token_id = vocabulary.bos, vocabulary.eos
    if config.is_encoder_decoder:
        config.decoder_start_token_id = vocabulary.bos
        config.forced_bos_token_id = config.forced_eos_token_id = None
    if hasattr(config, "decoder_vocab_size"):
        config.decoder_vocab_size = vocabulary.size


def config_fields(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a folder or a hub id, from the hub or the cache.

    A decoder-only model's texts also end with the ids that ``generation_config.json`` adds. Raises
    ``OSError`` or ``ValueError`` if a file cannot be read.
    """
    silence = hub_silence(name)
    local = bool(silence)
    if Path(name).is_dir() and not Path(name, _CONFIG).exists():
        raise FileNotFoundError(f"it has no {_CONFIG}")
    try:
        found = dict(PretrainedConfig.get_config_dict(name, local_files_only=local)[0])
        if found.get("model_type") in DECODERS:
            found[_EOS] = _ends(name, found.get(_EOS), local)
        return found
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{_CONFIG} has no fields, or is nested too deeply") from error
    except OSError as error:
        if silence:
            raise OSError(f"{silence}, and the cache has no {_CONFIG} of it") from error
        raise


def _ends(name: str, own: object, local: bool) -> object:
    """Return the ids that end a text: ``own``, or a list with those of the other file."""
    optional = {"_raise_exceptions_for_missing_entries": False, "local_files_only": local}
    file = cached_file(name, _GENERATION, **optional)
    fields = json.loads(Path(file).read_text("utf-8")) if file else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{_GENERATION} has no fields")
    both = (each if isinstance(each, list) else [each] for each in (own, fields.get(_EOS)))
    ids = [*dict.fromkeys(each for ends in both for each in ends if isinstance(each, int))]
    return ids[0] if len(ids) == 1 else ids or None
