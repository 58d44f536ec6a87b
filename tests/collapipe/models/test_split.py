"""The parts form the model; ``build_empty`` builds a module around given weights."""

import pytest
import torch
from torch import nn

from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.split import SplitModel, build_empty
from collapipe.models.transformer import TransformerSpec
from collapipe.tensors import Batch
from collapipe.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary(size=11, pad=0, bos=1, eos=2)
SPEC = TransformerSpec(3, 1, 16, 2, 24, dropout=0.2)


def test_parts_are_the_model_in_order() -> None:
    """Part and weight names form the model's names; each weight belongs to one part."""
    model = SplitModel(SPEC, VOCABULARY)
    parts = model.parts()
    assert list(parts) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    named = {
        f"{part}.{name}": weight
        for part, module in parts.items()
        for name, weight in module.named_parameters()
    }
    assert named.keys() == dict(model.named_parameters()).keys()
    assert all(named[name] is weight for name, weight in model.named_parameters())


def test_build_empty_wraps_the_weights_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module uses the weights' memory and type; all weights train and none is initialised."""
    weights = {
        name: tensor.double().clone()
        for name, tensor in SplitModel(SPEC, VOCABULARY).state_dict().items()
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    devices: set[str] = set()

    def build() -> nn.Module:
        module = SplitModel(SPEC, VOCABULARY)
        devices.update(parameter.device.type for parameter in module.parameters())
        return module

    state = torch.random.get_rng_state()
    model = build_empty(build, weights)
    assert devices == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()
        assert parameter.requires_grad
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, before[name])
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert not weights["embedding.tokens.weight"].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query.weight": torch.zeros(16, 17)}, "size mismatch for query.weight"),
        ({"query.bias": torch.zeros(1)}, "size mismatch for query.bias"),
        ({"query.bias": None}, "Missing key.*query.bias"),
        ({"query.scale": torch.zeros(1)}, "Unexpected key.*query.scale"),
    ],
)
def test_build_empty_refuses_weights_that_do_not_fit(
    change: dict[str, torch.Tensor | None], words: str
) -> None:
    """Wrong shapes, including those that would broadcast, and missing or unknown names."""

    def build() -> nn.Module:
        return nn.ModuleDict({"query": nn.Linear(16, 16)})

    weights = {**build().state_dict(), **change}
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        build_empty(build, {name: w for name, w in weights.items() if w is not None})


def test_the_loss_of_the_model_equals_that_of_its_parts() -> None:
    """Each part draws from its own random stream for micro-batch 0."""
    torch.manual_seed(0)
    model = SplitModel(SPEC, VOCABULARY).train()
    ids = torch.randint(3, 11, (2, 5))
    batch = Batch(ids, torch.ones(2, 5, dtype=torch.bool), ids)
    key = DropoutKey(1, 2, 3)
    hidden = batch.inputs
    for name, part in list(model.parts().items())[:-1]:
        with drawing_from(key.generator(name, 0)):
            hidden = part(hidden) if name == "embedding" else part(hidden, batch.mask)
    with drawing_from(key.generator("head", 0)):
        expected = model.head.loss(hidden, batch.mask, batch.targets)  # type: ignore[operator]
    assert torch.equal(model.loss(batch, key), expected)
    assert not torch.equal(model.loss(batch, DropoutKey(1, 2, 4)), expected)
