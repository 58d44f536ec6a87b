"""A model's configuration as plain values, from which another machine builds the same blocks.

A class is named by a word from a fixed list in this file, never by an import path, so the sender
cannot make the receiver import anything.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from collapipe.errors import ConfigError, WireError, one_line
from collapipe.models.cut import CutSpec
from collapipe.models.lora import LoraSpec
from collapipe.models.split import DerivedSpec, ModelSpec
from collapipe.models.stem import StemSpec
from collapipe.models.transformer import TransformerSpec

Description = dict[str, Any]
_KIND, _HUGGING_FACE = "kind", "huggingface"
_DERIVED: dict[str, type[DerivedSpec]] = {"lora": LoraSpec, "stem": StemSpec, "cut": CutSpec}
_KINDS: dict[str, type[Any]] = {"transformer": TransformerSpec, **_DERIVED}
_LOCAL = {"base", "store"}  # base has its own description; store is not described
_Scalar = (str, int, float, bool, type(None))
MOST_BLOCKS = 512  # four times those of the deepest known model
_MOST_SIZE, _MOST_HEADS = 2**24, 2**12  # some models have a norm for each head
_ROTARY = "partial_rotary_factor"  # of a table that is computed at once


def describe(spec: ModelSpec) -> Description:
    """Return a JSON-compatible description from which ``from_description`` builds an equal model.

    Raises ``ConfigError`` for a model of a class outside CollaPipe.
    """
    for kind, its in _KINDS.items():
        if type(spec) is its:
            names = {each.name for each in fields(cast(Any, spec))} - _LOCAL
            own = {name: getattr(spec, name) for name in names}
            base = {"base": describe(spec.base)} if isinstance(spec, DerivedSpec) else {}
            return {_KIND: kind, **own, **base}
    if type(spec).__name__ == "HuggingFaceSpec":  # whose module takes seconds to import
        return {_KIND: _HUGGING_FACE, **cast(Any, spec).portable()}
    raise ConfigError(
        f"model: blocks of a {type(spec).__name__} cannot be built on other machines; choose "
        "model=transformer or model=huggingface, or cluster=edge, whose devices are simulated"
    )


def from_description(description: Mapping[str, Any]) -> ModelSpec:
    """Return the model that ``describe`` described.

    Raises ``WireError`` for any other input, and for models that would take long to build: more
    than ``MOST_BLOCKS`` layers, or one derivation applied twice.
    """
    return _built(description, frozenset(_DERIVED))


def _built(description: Mapping[str, Any], derivations: frozenset[str]) -> ModelSpec:
    """Build a model that may use only these ``derivations``, each at most once."""
    values = dict(description)
    kind = values.pop(_KIND, None)
    try:
        if kind == _HUGGING_FACE:
            from collapipe.models.huggingface.spec import HuggingFaceSpec

            _check_sizes(values | values["config"])
            return cast(ModelSpec, HuggingFaceSpec.from_portable(values))
        if kind in derivations:
            base = _built(values.pop("base"), derivations - {kind})
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            derived = cast(ModelSpec, _DERIVED[kind](base, **_plain(values)))
            if not 1 <= derived.num_blocks <= base.num_blocks:
                raise ValueError(f"{derived.num_blocks} blocks out of {base.num_blocks}")
            return derived
        if kind == "transformer":
            return TransformerSpec(**_plain(values))
    except (ConfigError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the description of a model cannot be used: {one_line(error)}") from error
    raise WireError(f"the description of a model has the unknown kind {str(kind)[:40]!r}")


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an implausible size. Each layer takes time to build, and other sizes
    may allocate memory before it can be counted."""
    for name, value in values.items():
        few = "layer" in name or name == "num_blocks"
        most = MOST_BLOCKS if few else _MOST_HEADS if "head" in name else _MOST_SIZE
        if isinstance(value, dict):
            _check_sizes(value)
        elif name == _ROTARY and value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}={value}: must be above 0, at most 1")
        elif isinstance(value, int) and abs(value) > most and "theta" not in name:
            raise ValueError(f"{name[:40]}={value}: at most {most:,}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` if each is a scalar or a tuple of scalars.

    Raises ``TypeError`` for other types and ``ValueError`` for an implausible size.
    """
    _check_sizes(values)
    for name, value in values.items():
        each = value if type(value) is tuple else (value,)
        if not all(isinstance(one, _Scalar) for one in each):
            raise TypeError(f"{name} must be a number or a text")
    return dict(values)
