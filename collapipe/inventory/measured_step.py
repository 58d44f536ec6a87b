"""Read and write the measured steps of an inventory's clusters, for the first round of runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import TypeAdapter

from collapipe.config.resolved import value_at
from collapipe.errors import ConfigError
from collapipe.inventory.schema import InventorySection
from collapipe.inventory.yaml_file import load
from collapipe.process.files import read, replace
from collapipe.step_law import StepLaw
from collapipe.validation import from_json

_OPTIONS = (  # a measured step holds for the same values only
    *("model", "adapter", "batch_size", "task.max_length", "decoder", "compression"),
    *(f"pipeline.{name}" for name in ("num_micro_batches", "schedule", "recompute")),
    *(f"pipeline.{name}" for name in ("dtype", "threads", "wire_dtype", "relay")),
)
_TIMES = {"name", "chunk", "flops_per_s", "d2d_rate_bps", "launch_s", "hop_latency_s"}
_FIGURES: Any = {"devices": {"__all__": _TIMES}, "links": True}  # of a cluster


@dataclass(frozen=True, slots=True)
class _Content:
    options: Mapping[str, Any]
    figures: Sequence[Mapping[str, Any]]  # of the clusters; steps are relative to them
    steps: Sequence[StepLaw | None]  # of the clusters, in the order of the inventory


_CONTENT = TypeAdapter(_Content)


def step_file(inventory: Path) -> Path:
    """Return the file of the measured steps, which is in the folder of the ``inventory``."""
    return (own := inventory.resolve()).with_name(f"{own.name}.step.json")


def write_steps(inventory: Path, tree: object, steps: Sequence[StepLaw | None]) -> Path:
    """Write the steps of the inventory's clusters that a run with the options ``tree`` measured."""
    file = step_file(inventory)
    replace(file, _CONTENT.dump_json(_Content(options_of(tree), _figures(inventory), steps)))
    return file


def read_step(
    inventory: Path, tree: object, place: int, devices: Collection[str]
) -> StepLaw | None:
    """Return the measured step of the inventory's cluster at ``place``, which has these
    ``devices``; None if there is no file.

    Raises ``ConfigError`` for an invalid file, or one of other devices, figures or options.
    """
    file, how = step_file(inventory), f"collapipe device measure {quote(str(inventory))}"
    again = f"measure again: {how} OPTIONS --write, with the options of collapipe run"
    if not file.exists():
        return None
    content = from_json(_CONTENT, file, read(file, again), "measured steps", f"; {again}")
    own = options_of(tree)
    if other := [name for name in own if content.options.get(name) != own[name]]:
        raise ConfigError(f"{file}: was measured with another {', '.join(other)}; {again}")
    for step in content.steps[place : place + 1]:
        if step is not None and {*devices} == {*step.devices, *step.blocks, *step.present}:
            if content.figures[place : place + 1] != _figures(inventory)[place : place + 1]:
                raise ConfigError(f"{file}: was measured with other figures of devices; {again}")
            return step
    raise ConfigError(f"{file}: was not measured with {', '.join(devices)}; {again}")


def _figures(inventory: Path) -> list[dict[str, Any]]:
    """Return the figures of each cluster's devices and links."""
    clusters = load(inventory).parse(InventorySection).clusters
    return [each.model_dump(mode="json", include=_FIGURES) for each in clusters]


def options_of(tree: object) -> dict[str, Any]:
    """Return the options of a run for which a measured step holds."""
    return {name: value_at(tree, name) for name in _OPTIONS}
