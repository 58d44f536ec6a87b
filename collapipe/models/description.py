"""A model's configuration as plain values, from which another machine builds the same blocks.

Classes are named by a word from this file, never by a path, and nothing is imported that the other
side names.
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
_OWN: dict[str, type[Any]] = {"transformer": TransformerSpec}
_DERIVED: dict[str, type[DerivedSpec]] = {"lora": LoraSpec, "stem": StemSpec, "cut": CutSpec}
_LOCAL = {"base", "store"}  # described by themselves, and not at all
_Scalar = (str, int, float, bool, type(None))


def describe(spec: ModelSpec) -> Description:
    """What ``from_description`` builds an equal model from; JSON can hold it.

    Raises ``ConfigError`` for a model of a class that is not ours.
    """
    kinds: dict[str, Any] = {**_OWN, **_DERIVED}
    for kind, its in kinds.items():
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
    """The model of ``describe``. Raises ``WireError`` for what it never makes."""
    values = dict(description)
    kind = values.pop(_KIND, None)
    try:
        if kind == _HUGGING_FACE:
            from collapipe.models.huggingface.spec import HuggingFaceSpec

            return cast(ModelSpec, HuggingFaceSpec.from_portable(values))
        if kind in _DERIVED:
            base = from_description(values.pop("base"))
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            return cast(ModelSpec, _DERIVED[kind](base, **_plain(values)))
        if kind in _OWN:
            return cast(ModelSpec, _OWN[kind](**_plain(values)))
    except (ConfigError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the description of a model cannot be used: {one_line(error)}") from error
    raise WireError(f"the description of a model has the unknown kind {str(kind)[:40]!r}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, where each is a scalar or a tuple of them. Raises ``TypeError``."""
    for name, value in values.items():
        if not all(
            isinstance(each, _Scalar) for each in (value if type(value) is tuple else (value,))
        ):
            raise TypeError(f"{name} is neither a number nor a text")
    return dict(values)
