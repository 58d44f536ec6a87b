"""``copied`` copies a module as ``copy.deepcopy`` does, including objects and tensors that it
shares."""

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface import SIZES, VOCABULARY
from torch import Tensor, nn

from collapipe.models.copying import copied
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.models.split import ModelSpec, builders
from collapipe.models.transformer import EncoderBlock, TransformerSpec
from collapipe.models.weights.without_values import WithoutValues

_CONTAINERS = dict, list, set, tuple
_IN_FILES = {"rope_theta", "decoder_start_token_id"}  # fields of a config.json, not of the class
SPECS: dict[str, Callable[[], ModelSpec]] = {
    "ours": lambda: TransformerSpec(2, 1, 8, 2, 12, 0.1),
    "adapters": lambda: LoraSpec(of_family("bert"), quantization="nf4", dropout=0.1),
    **{family: lambda family=family: of_family(family) for family in SIZES},  # type: ignore[misc]
}


def of_family(family: str) -> ModelSpec:
    sizes = {name: size for name, size in SIZES[family].items() if name not in _IN_FILES}
    return HuggingFaceSpec(family=family, config=sizes)


def objects(root: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every object that a module refers to, with its path, once for each reference."""
    seen, todo = set[int](), [(path, root)]
    while todo:
        path, value = todo.pop()
        yield path, value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [(f"{path}[{key}]", each) for key, each in value.items()]
        elif isinstance(value, _CONTAINERS):
            todo += [(f"{path}[{n}]", each) for n, each in enumerate(value)]
        elif not isinstance(value, Tensor | type) and hasattr(value, "__dict__"):
            todo += [(f"{path}.{name}", each) for name, each in vars(value).items()]


def described(root: nn.Module, original: nn.Module) -> list[tuple[object, ...]]:
    """Path, type and number of each object, whether ``original`` has the same object, and its
    value."""
    shared, numbers = {id(each) for _, each in objects(original)}, dict[int, int]()
    found = list[tuple[object, ...]]()
    for path, each in objects(root):
        value: Any = None
        if isinstance(each, Tensor):
            value = each.shape, each.dtype, each.device, each.requires_grad
            value += (None if each.is_meta else each.tolist(),)
        elif isinstance(each, bool | int | float | str):
            value = each
        own = None if value == each else (numbers.setdefault(id(each), len(numbers)))
        found.append((path, type(each), own, id(each) in shared, value))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_copies_equal_deepcopies(name: str) -> None:
    spec = SPECS[name]()
    for build in builders(spec, VOCABULARY).values():
        with WithoutValues():
            part = build()
        assert described(copied(part), part) == described(copy.deepcopy(part), part)


def test_a_given_tensor_replaces_the_original_at_each_reference() -> None:
    part = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(), nn.ReLU())
    part.twin, part.seen = part[0], [part[0].weight]  # type: ignore[assignment]
    weight = nn.Parameter(torch.ones(2, 2))
    found: Any = copied(part, {id(part[0].weight): weight})
    assert found[0].weight is weight and found.seen[0] is weight and found.twin is found[0]
    assert found[1] is not part[1] and type(found[1]) is nn.ModuleList
    assert torch.equal(found[0].bias, part[0].bias) and found[0].bias is not part[0].bias


class Locked(nn.Module):
    """A module with a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


def test_shared_containers_stay_shared_and_a_modules_own_state_is_copied() -> None:
    part = nn.Sequential(Locked())
    part.known, part.seen = [], {}  # type: ignore[assignment]
    part.again = part.known
    found: Any = copied(part, {id(part.seen): (seen := {"other": 1})})
    assert found.again is found.known is not part.known and found.seen is seen
    assert type(found[0]) is Locked and not hasattr(found[0], "lock")


def test_blocks_built_without_values_are_independent_copies() -> None:
    spec = TransformerSpec(2, 1, 8, 2, 12, 0.2)
    with WithoutValues():
        first, second = spec.build_block(index=0), spec.build_block(index=1)
        other = replace(spec, feed_forward_dim=9).build_block(0)
    first.requires_grad_(False)
    assert all(each.requires_grad for each in second.parameters())
    assert not any(each.is_meta for each in spec.build_block(0).parameters())
    shapes = [{name: w.shape for name, w in each.state_dict().items()} for each in (second, other)]
    assert shapes[0] == {name: w.shape for name, w in EncoderBlock(spec).state_dict().items()}
    assert shapes[0] != shapes[1]
