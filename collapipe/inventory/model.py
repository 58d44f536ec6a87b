"""The model of an inventory: described by figures, or named, and then counted."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from collapipe.devices.block_cost import transformer_block_cost
from collapipe.errors import ConfigError
from collapipe.inventory.yaml_file import Section, load, nearest
from collapipe.state import BlockCost

TOKENS = 64  # of a sample, for a model that is named and says nothing else
MOST_BLOCKS = 10_000

_FIGURES = tuple(field.name for field in fields(BlockCost))
_MODELS = Path(__file__).parents[2] / "conf" / "model"
_OF_A_NAME = ("family", "config", "tokens")
_MOST_TOKENS = 10**6


@dataclass(frozen=True, slots=True)
class Model:
    """The file's ``model``; a figure that nobody gave is absent from ``figures``."""

    section: Section
    num_blocks: int
    figures: Mapping[str, float]


def read_model(root: Section, batch_size: int) -> Model:
    """The file's ``model``; what stands beside a name goes over it.

    A name is a file of ``conf/model/`` with sizes, or else a folder, from the inventory's own on,
    or a hub id; of these two the configuration alone is read. Raises ``ConfigError``.
    """
    section = root.section("model")
    section.allow(("name", "num_blocks", *_OF_A_NAME, *_FIGURES))
    given = {name: section.number(name) for name in _FIGURES if name in section}
    if "name" not in section and "family" not in section:
        return _described(section, given)
    tokens = section.whole("tokens", _MOST_TOKENS, default=TOKENS)
    sizes = _sizes(section)
    if sizes is None:
        num_blocks, cost = _counted(section, tokens, batch_size)
    else:
        num_blocks, cost = _by_size(section, sizes, tokens, batch_size)
    known = {name: getattr(cost, name) for name in _FIGURES}
    return Model(section, num_blocks, {**known, **given})


def _described(section: Section, given: Mapping[str, float]) -> Model:
    for key in _OF_A_NAME:
        if key in section:
            raise section.error(
                key, "belongs to a model by name; give name as well, or figures alone"
            )
    if "num_blocks" not in section:
        raise section.error(
            "num_blocks",
            "is missing; give it, or name: a folder, a hub id or a file of conf/model/",
        )
    return Model(section, section.whole("num_blocks", MOST_BLOCKS), given)


def _known_names() -> list[str]:
    return sorted(path.stem for path in _MODELS.glob("*.yaml"))


def _sizes(section: Section) -> Section | None:
    """The file of ``conf/model/`` that is named; None for a model of transformers."""
    if "name" not in section or section.text("name") not in _known_names():
        return None
    name = section.text("name")
    sizes = load(_MODELS / f"{name}.yaml")
    if "dim" not in sizes:
        raise section.error("name", f"{name} has no sizes; name the folder or hub id itself")
    for key in ("family", "config"):
        if key in section:
            raise section.error(key, f"{name} of conf/model/ has no such key; remove it")
    return sizes


def _by_size(
    section: Section, sizes: Section, tokens: int, batch_size: int
) -> tuple[int, BlockCost]:
    dim, inner = (sizes.whole(key, 10**6) for key in ("dim", "feed_forward_dim"))
    owner = section if "num_blocks" in section else sizes
    cost = transformer_block_cost(dim, inner, tokens, batch_size)
    return owner.whole("num_blocks", MOST_BLOCKS), cost


def _counted(section: Section, tokens: int, batch_size: int) -> tuple[int, BlockCost]:
    """L and a block's cost of a model of transformers; its weights are neither read nor drawn."""
    from collapipe.models.cost import measure_cost  # torch and transformers take seconds
    from collapipe.models.huggingface.spec import HuggingFaceSpec
    from collapipe.models.split import ModelSpec

    family = section.text("family") if "family" in section else None
    blocks = section.whole("num_blocks", MOST_BLOCKS) if "num_blocks" in section else None
    config = _fields(section.section("config")) if "config" in section else {}
    name = _located(section) if "name" in section else None
    try:
        spec = cast(ModelSpec, HuggingFaceSpec(name, family, blocks, config=config))  # knows L now
        return spec.num_blocks, measure_cost(spec, tokens, batch_size)
    except ConfigError as error:  # begins with the key
        raise ConfigError(f"{section.file}:{section.line}: {error}") from error


def _located(section: Section) -> str:
    """The folder beside the inventory, or else the hub id, that is named."""
    name = section.text("name")
    folder = Path(section.file).parent / name
    if folder.is_dir():
        return str(folder)
    if difflib.get_close_matches(name, _known_names(), cutoff=0.8):  # the hub may take long
        raise section.error("name", f"no model of conf/model/{nearest(name, _known_names())}")
    return name


def _fields(section: Section) -> dict[str, Any]:
    return {key: _value(section, key) for key in section.entries}


def _value(section: Section, key: str) -> Any:
    """A number, true, false or null as JSON writes them; any other text is one."""
    text = section.text(key)
    try:
        return json.loads(text)
    except ValueError:
        return text
