"""Load a pretrained model's tokeniser from a folder or a hub id."""

from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
)
from transformers.models.auto.tokenization_auto import (
    get_tokenizer_config,
    tokenizer_class_from_name,
)
from transformers.utils import cached_file

from collapipe.errors import ConfigError, one_line
from collapipe.hub import hub_silence
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, check_tokenizer


def pretrained_tokenizer(name: str) -> Tokenizer:
    """Load the tokeniser from a folder or a hub id. Raises ``ConfigError`` if that fails."""
    try:
        original = _load(name)
        backend = getattr(original, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                "has no tokenizer.json; convert it with transformers, or take another"
            )
        bos = original.cls_token or original.bos_token or original.eos_token
        eos = original.sep_token or original.eos_token
        if eos is None or bos is None:
            raise ConfigError(
                "its tokeniser has no token for a text's end; set eos_token or sep_token in "
                "tokenizer_config.json"
            )
        # Padding is masked, so any token will do if there is no padding token, as in GPT-2.
        special_tokens = SpecialTokens(original.pad_token or eos, bos, eos)
        check_tokenizer(json_text := backend.to_str())
        return Tokenizer(json_text, special_tokens, chat_template=_chat_template(original))
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer={name}: {error}") from error
    except Exception as error:  # unknown name, no network, damaged file: many classes
        raise ConfigError(
            f"data.tokenizer={name}: cannot be read ({one_line(error)}); write a tokeniser there "
            "with transformers' save_pretrained, or name another folder or hub id"
        ) from error


def _chat_template(original: Any) -> ChatTemplate | None:
    """Return the model's template for conversations without tools; None if it has none."""
    found = original.chat_template
    source = found.get("default") if isinstance(found, dict) else found
    if not source:
        return None
    return ChatTemplate(source, dict(original.special_tokens_map), date.today().isoformat())


def _load(name: str) -> Any:
    """Load a tokeniser without running code that comes with it, and without a prompt for that."""
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds of the prompt; 0 refuses at once
    silence = hub_silence(name)
    cached: dict[str, Any] = {"local_files_only": bool(silence)}
    try:
        _check_class(name, cached)
        ready = cached_file(
            name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **cached
        )
        if ready is not None:
            check_tokenizer(Path(ready).read_text("utf-8"))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **cached)
    except Exception as error:
        if isinstance(error, OSError) and silence:
            raise ConfigError(f"{silence}, and the cache has no tokeniser of it") from error
        if isinstance(error, ConfigError) or not (Path(name) / "vocab.txt").is_file():
            raise
    return BertTokenizer.from_pretrained(name)  # its config.json names no class


def _check_class(name: str, cached: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a configuration names a class that is not a tokeniser.

    ``AutoTokenizer`` would load any class of transformers by name, with or without ``Fast``.
    """
    config: dict[str, Any] = {}
    with suppress(OSError):  # a tokeniser's folder may have no model
        config, _ = PretrainedConfig.get_config_dict(name, **cached)
    for source in (get_tokenizer_config(name, **cached), config):
        named = str(source.get("tokenizer_class") or "")
        for spelling in (named, named.removesuffix("Fast"), f"{named}Fast"):
            found = tokenizer_class_from_name(spelling)
            known = isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)
            if found is not None and not known:
                raise ConfigError(f"its tokenizer_class {named[:80]!r} is no tokeniser; correct it")
