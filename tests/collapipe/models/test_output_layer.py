"""Computing logits in pieces gives the same loss and predictions, with little memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface import VOCABULARY, batch_for, spec_of, without_dropout
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collapipe.models import output_layer
from collapipe.models.dropout import drawing_from
from collapipe.models.output_layer import OutputLayer
from collapipe.models.transformer import TransformerSpec
from collapipe.models.weights.kept import Widened

TOKENS, CLASSES, DIM = 37, 50, 8
MOST_BYTES = 64 * 2**20


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, groups and slices, whose sizes do not divide the numbers of tokens and
    classes."""
    for name, numbers in {"_WHOLE": 0, "_PIECE": 6 * CLASSES, "_GROUP": 2 * CLASSES}.items():
        monkeypatch.setattr(output_layer, name, numbers)
    monkeypatch.setattr(output_layer, "_SLICE", 7 * DIM)


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2) * 2


def as_they_are(logits: Tensor) -> Tensor:
    return logits


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("finish", [as_they_are, capped])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
def test_loss_gradients_and_predictions_in_pieces_equal_those_of_all_logits(
    trains: bool, kept: torch.dtype, finish: Callable[[Tensor], Tensor]
) -> None:
    """Gradients of two calls are summed; only a float32 weight trains."""
    trains = trains and kept == torch.float32
    torch.manual_seed(0)
    weight, bias = torch.randn(CLASSES, DIM).to(kept), torch.randn(CLASSES)
    hidden, targets = torch.randn(TOKENS, DIM), torch.randint(CLASSES, (TOKENS,))

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = finish(functional.linear(hidden, weight.float(), bias))
        return functional.cross_entropy(logits, targets, reduction="sum")

    def pieces(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return OutputLayer(weight, bias, finish).loss(hidden, targets)

    results = []
    for loss_of in (whole, pieces):
        x, w, b = (each.clone() for each in (hidden, weight, bias))
        x.requires_grad_()
        for trained in (w, b) if trains else ():
            trained.requires_grad_()
        for _ in range(2):
            loss = loss_of(x, w, b)
            (loss / 7).backward()
        results.append([loss.detach(), x.grad, w.grad, b.grad])
    torch.testing.assert_close(*results)
    found = OutputLayer(weight, bias, finish).most_likely(hidden)
    logits = finish(functional.linear(hidden, weight.float(), bias))
    assert torch.equal(found, logits.argmax(-1))


def test_a_kept_weight_is_widened_in_slices_unless_it_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of logits does not matter."""
    layer = OutputLayer(Widened(torch.randn(CLASSES, DIM).bfloat16(), torch.float32), None)
    assert layer.at_once(1, torch.float32)
    monkeypatch.setattr(output_layer, "_SLICE", 7 * DIM)
    assert not layer.at_once(1, torch.float32)
    assert {len(rows) for _, rows in layer.slices(torch.float32)} == {7, CLASSES % 7}


def test_the_loss_of_few_logits_has_the_bits_of_torch() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, DIM), torch.randn(CLASSES, DIM)
    targets = torch.randint(CLASSES, (TOKENS,))
    expected = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert torch.equal(OutputLayer(weight, None).loss(hidden, targets), expected)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *[(name, "causal") for name in ("gpt2", "llama", "llama-tied")],
        *[(name, "decoder") for name in ("bart", "marian", "t5", "t5-gated")],
    ],
)
def test_heads_of_transformers_in_pieces_equal_heads_at_once(
    name: str, head: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The heads include scales and biases of the models, and layers after the blocks."""
    torch.manual_seed(0)
    spec = spec_of(tmp_path, name, head, **without_dropout(name.partition("-")[0]))
    part: Any = spec.build_head(VOCABULARY)
    for value in part.state_dict().values():
        value.normal_(std=0.3)
    assert_same(part, spec.dim, batch_for(head), request)


@pytest.mark.parametrize("tied", [False, True])
def test_our_decoder_in_pieces_equals_the_decoder_at_once(
    tied: bool, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    spec = TransformerSpec(1, 1, 16, 2, 24, dropout=0.0, tie_embeddings=tied)
    assert_same(spec.build_head(VOCABULARY), spec.dim, batch_for("decoder"), request)


def assert_same(part: Any, dim: int, batch: Any, request: pytest.FixtureRequest) -> None:
    hidden = torch.randn(*batch.mask.shape, dim)

    def results() -> list[Any]:
        part.zero_grad()
        own = hidden.clone().requires_grad_()
        with drawing_from(torch.Generator()):
            loss = part.loss(own, batch.mask, batch.targets)
        loss.backward()
        with torch.inference_mode():
            ids = part.generate(hidden, batch.mask, 7)
            alone = part.loss(hidden, batch.mask, batch.targets)
        gradients = {key: weight.grad for key, weight in part.named_parameters()}
        return [ids, loss.detach(), alone, own.grad, gradients]

    at_once = results()
    request.getfixturevalue("in_pieces")
    pieces = results()
    assert pieces[0] == at_once[0]
    torch.testing.assert_close(pieces[1:], at_once[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kept", "trains"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_large_vocabulary_needs_little_memory(kept: torch.dtype, trains: bool) -> None:
    """At most 64 MiB besides the gradients, on fake tensors, with Qwen2's vocabulary and width."""
    tokens, classes, dim = 70, 151_936, 896  # two pieces
    with FakeTensorMode(), Allocated() as allocated:
        weight = torch.empty(classes, dim, dtype=kept, requires_grad=trains)
        hidden = torch.empty(tokens, dim, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
        allocated.forget()
        OutputLayer(weight, None, capped).loss(hidden, targets).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        gradients = hidden.grad.nbytes + (weight.grad.nbytes if weight.grad is not None else 0)
        assert (weight.grad is not None) == trains
    assert allocated.most_bytes - gradients <= MOST_BYTES


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the maximum of bytes of live tensors."""

    def __enter__(self) -> "Allocated":
        self.forget()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def forget(self) -> None:
        self.most_bytes, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count its new tensors."""
        out = func(*args, **(kwargs or {}))
        given = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and id_of(each) not in given:
                storage = each.untyped_storage()
                self._alive[id_of(each)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive.values()))
        return out


def id_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
