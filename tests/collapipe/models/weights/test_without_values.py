"""Modules built without values have the shapes of meta-device modules and compute no values."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collapipe.models.split import SplitModel
from collapipe.models.transformer import TransformerSpec
from collapipe.models.weights.without_values import WithoutValues
from collapipe.text.vocabulary import Vocabulary

SPEC = TransformerSpec(2, 1, 8, 2, 12, 0.1)
VOCABULARY = Vocabulary(size=9, pad=0, bos=1, eos=2)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def forms(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, type(each), each.shape, each.dtype, each.device, each.requires_grad)
        for name, each in model.state_dict(keep_vars=True).items()
    ]


def test_a_model_without_values_equals_one_on_the_meta_device() -> None:
    with torch.device("meta"):
        expected = SplitModel(SPEC, VOCABULARY)
    with WithoutValues():
        assert torch.get_default_device().type == "meta"
        found = SplitModel(SPEC, VOCABULARY)
    assert forms(found) == forms(expected) != []
    assert torch.get_default_device().type == "cpu"


def test_no_operation_sets_values() -> None:
    operations = Operations()
    with operations, WithoutValues():
        SplitModel(SPEC, VOCABULARY)
    assert "empty" in operations.seen
    assert not {each for each in operations.seen if each.endswith("_")}


def test_tensors_on_an_explicit_cpu_device_get_values() -> None:
    with WithoutValues():
        found = nn.init.ones_(torch.empty(3, device="cpu"))
        with torch.device("cpu"):
            other = torch.empty(3).fill_(1.0)
    assert found.tolist() == other.tolist() == [1.0] * 3


def test_the_default_device_of_the_program_is_kept() -> None:
    """Also if contexts are nested, in a run or in a model's own code."""
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"), WithoutValues():
            assert torch.ones(1).is_meta
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
