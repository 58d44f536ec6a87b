"""Frozen weights are found in the model's own files or in a store."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from collapipe.errors import DataError, WireError
from collapipe.models import frozen
from collapipe.models.cut import CutSpec
from collapipe.models.frozen import FrozenParts, find, frozen_in, published
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.models.part import prefixed
from collapipe.models.split import EMBEDDING, HEAD, ModelSpec, SplitModel, builders
from collapipe.models.stem import StemSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.models.weights.quantised import quantise
from collapipe.wire.frozen_store import FrozenStore, digest
from tests.huggingface import VOCABULARY, spec_of


def model(tmp_path: Path, name: str, head: str, dtype: torch.dtype = torch.float32) -> ModelSpec:
    """A small model with weights in its folder."""
    spec = spec_of(tmp_path, name, head)
    whole = getattr(transformers, spec.class_name).from_config(spec.run_config(VOCABULARY))
    whole.to(dtype).save_pretrained(spec.name)
    return cast(ModelSpec, HuggingFaceSpec(spec.name, None, spec.num_blocks, head, pretrained=True))


def parts_in(spec: ModelSpec) -> dict[str, dict[str, torch.Tensor]]:
    """Build the model and return the frozen weights of each part."""
    built = SplitModel(spec, VOCABULARY).parts()
    return {name: frozen_in(part, torch.float32) for name, part in built.items()}


def lacking(parts: FrozenParts) -> list[str]:
    """The parts whose weights are not found on this machine."""
    return [part for part in parts if parts.find(part) is None]


def parts_of(spec: ModelSpec, *stores: FrozenStore) -> FrozenParts:
    """The frozen parts of a model, with the digests of its current weights."""
    digests = {name: digest(each) for name, each in parts_in(spec).items() if each}
    return FrozenParts(digests, spec, VOCABULARY, torch.float32, stores)


@pytest.mark.parametrize("quantization", [None, "int8", "nf4"])
@pytest.mark.parametrize("kind", ["lora", "stem", "cut"])
def test_frozen_parts_of_derived_models_are_found_in_the_folder(
    tmp_path: Path, kind: str, quantization: str | None
) -> None:
    base = model(tmp_path, "llama-tied", "causal")
    adapted = LoraSpec(base, rank=2, first_block=1, quantization=quantization)
    spec = {"lora": adapted, "stem": StemSpec(adapted, 1), "cut": CutSpec(adapted, 2)}[kind]
    parts = parts_of(spec)
    assert lacking(parts) == [] and {EMBEDDING, HEAD} < {*parts}
    built = SplitModel(spec, VOCABULARY).state_dict()
    for part in parts:
        for name, each in prefixed(part, parts[part]).items():
            assert torch.equal(each, built[name])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_in_another_type_are_converted(tmp_path: Path, quantization: str | None) -> None:
    """Scales of quantised weights are converted too, to the type in which the layer computes."""
    base = model(tmp_path, "llama", "causal", torch.bfloat16)
    built = SplitModel(spec := LoraSpec(base, rank=2, quantization=quantization), VOCABULARY)
    for dtype in (torch.float32, torch.float64):
        own = {name: frozen_in(part, dtype) for name, part in built.parts().items()}
        digests = {name: digest(each) for name, each in own.items()}
        parts = FrozenParts(digests, spec, VOCABULARY, dtype, ())
        assert lacking(parts) == []
        found = {each.dtype for part in parts for each in parts[part].values()}
        assert found - {torch.int8} == {dtype}


def test_a_quantised_weight_of_another_shape_is_not_used(tmp_path: Path) -> None:
    """The codes of the transposed weight would have the same shape."""
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
    file = tmp_path / "llama" / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].T.contiguous()}, file)
    with torch.device("meta"):
        blocks = [spec.build_block(index) for index in range(2)]
    found = [published(spec, f"blocks.{n}", each, torch.float32) for n, each in enumerate(blocks)]
    assert [each is None for each in found] == [True, False]


def test_tensors_in_use_are_found_again_until_they_are_released(tmp_path: Path) -> None:
    """The same tensor objects are returned, not copies."""
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
    parts = parts_of(spec)
    own = parts["blocks.0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceSpec, "published", lambda *_: None)
        assert all(each is own[name] for name, each in parts["blocks.0"].items())
        own.clear()
        assert lacking(parts) == [*parts]


def test_threads_that_ask_at_once_share_the_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
    parts, together = parts_of(spec), threading.Barrier(2)

    def first_together(weight: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # breaks, because the other thread waits for this one
        return quantise(weight, how)

    monkeypatch.setattr(frozen, "quantise", first_together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(parts.__getitem__, ["blocks.0"] * 2)
    assert all(each is other[name] for name, each in one.items())


def test_blocks_are_found_in_the_folder_if_the_head_is_new(tmp_path: Path) -> None:
    made = spec_of(tmp_path, "bert", "tokens")
    transformers.BertForMaskedLM(made.run_config(VOCABULARY)).save_pretrained(made.name)
    spec = HuggingFaceSpec(made.name, None, 4, "tokens", pretrained=True)
    parts = parts_of(LoraSpec(cast(ModelSpec, spec), rank=2))
    assert lacking(parts) == [] and len(parts) == 5


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_changed_weights_are_missing_until_they_are_stored(
    tmp_path: Path, quantization: str | None
) -> None:
    store = FrozenStore(tmp_path / "store")
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization=quantization)
    parts = parts_of(spec, store)
    held = parts["blocks.1"]
    block = {name: each.clone() for name, each in held.items()}
    model(tmp_path, "llama", "causal")  # new random weights, in the same folder
    for file in store.folder.glob("*"):
        file.unlink()
    assert lacking(parts) == [*parts]
    with pytest.raises(DataError, match=r"blocks\.1: .*model\.name=.*llama.*store") as caught:
        parts["blocks.1"]
    assert "\n" not in str(caught.value)
    assert store.add(block) == parts.digests["blocks.1"]
    assert lacking(parts) == [part for part in parts if part != "blocks.1"]


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the form of each weight that is quantised during the test."""
    found = list[str]()

    def counted(weight: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(how)
        return quantise(weight, how)

    monkeypatch.setattr(frozen, "quantise", counted)
    return found


LAYERS = 7  # linear layers of a block


def block_in_nf4(folder: Path) -> Callable[[FrozenStore], str]:
    """A function that returns the digest of a block's weights. It releases the weights, so that
    this process cannot find them again."""
    spec = LoraSpec(model(folder, "llama", "causal"), rank=2, quantization="nf4")
    with torch.device("meta"):
        block = spec.build_block(0)

    def ask(store: FrozenStore) -> str:
        found = published(spec, "blocks.0", block, torch.float32, store=store)
        assert found is not None and digest(found[1]) == found[0]
        return found[0]

    return ask


def test_invalid_notes_and_notes_that_others_can_write_are_not_used(
    tmp_path: Path, quantised: list[str]
) -> None:
    """Malformed notes and notes of weights that are no longer stored are not used either. Each time
    the weights are quantised again."""
    ask, store = block_in_nf4(tmp_path), FrozenStore(tmp_path / "store")
    name, made = ask(store), LAYERS
    (note,) = store.folder.glob("*.made")
    for invalid in ("0" * 63, "x" * 64, "0" * 65, "\udcff"):
        note.write_bytes(invalid.encode(errors="surrogateescape"))
        assert ask(store) == name and len(quantised) == (made := made + LAYERS)
    for place, mode, safe in ((note, 0o666, 0o644), (store.folder, 0o770, 0o700)):
        place.chmod(mode)
        assert ask(store) == name and len(quantised) == (made := made + LAYERS)
        place.chmod(safe)
        assert ask(store) == name and len(quantised) == made
    (store.folder / f"{name}.safetensors").unlink()
    assert ask(store) == name and len(quantised) == made + LAYERS


@pytest.mark.parametrize("constant", ["__version__", "FORMAT"])
def test_notes_of_other_versions_are_not_used(
    tmp_path: Path, quantised: list[str], constant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, store = block_in_nf4(tmp_path), FrozenStore(tmp_path / "store")
    ask(store)
    monkeypatch.setattr(frozen, constant, "another one")
    ask(store)
    assert len(quantised) == 2 * LAYERS


def test_notes_of_changed_files_are_not_used(tmp_path: Path, quantised: list[str]) -> None:
    """The file keeps its modification time, which copying tools may set."""
    ask, store = block_in_nf4(tmp_path), FrozenStore(tmp_path / "store")
    ask(store)
    file = tmp_path / "llama" / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x00")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    ask(store)
    assert len(quantised) == 2 * LAYERS


def test_weights_with_another_digest_are_quantised_once(
    tmp_path: Path, quantised: list[str]
) -> None:
    """They are not stored; the second search uses the note."""
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
    with torch.device("meta"):
        block = spec.build_block(0)
    store = FrozenStore(tmp_path / "store")
    for _ in range(2):
        assert find("0" * 64, spec, "blocks.0", block, torch.float32, [store]) is None
        assert len(quantised) == LAYERS and not [*store.folder.glob("*.safetensors")]


def test_a_store_of_a_run_that_is_not_a_cache_keeps_no_notes(tmp_path: Path) -> None:
    run = FrozenStore(tmp_path / "run", is_cache=False)
    block_in_nf4(tmp_path)(run)
    assert not run.folder.exists()


def test_quantised_weights_are_reused_until_the_files_change(
    tmp_path: Path, quantised: list[str]
) -> None:
    """Weights with another digest than the wanted one are not returned."""
    store = FrozenStore(tmp_path / "store")
    digests = list[str]()
    for drawn in range(2):  # in the same folder
        spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
        with torch.device("meta"):
            block = spec.build_block(0)
        for attempt in range(3):
            found = published(spec, "blocks.0", block, torch.float32, store=store)
            assert found is not None and digest(found[1]) == found[0]
            assert len(quantised) == LAYERS * (drawn + 1), attempt
            name = found[0]
            del found  # otherwise this process finds these tensors again
        digests.append(name)
        assert find("0" * 64, spec, "blocks.0", block, torch.float32, [store]) is None
        assert len(quantised) == LAYERS * (drawn + 1)
    assert digests[0] != digests[1]


def test_a_damaged_weights_file_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = parts_of(LoraSpec(model(tmp_path, "llama", "causal"), rank=2))
    file = tmp_path / "llama" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert lacking(parts) == [*parts]
    assert len(caplog.messages) == 1  # for all parts
    assert f"model.name={tmp_path / 'llama'}: cannot read weights" in caplog.text
    file.unlink()
    assert lacking(parts) == [*parts]


def test_a_model_without_files_has_no_published_weights() -> None:
    spec = LoraSpec(TransformerSpec(num_blocks=1, dim=16, num_heads=2), rank=2)
    with torch.device("meta"):
        block = builders(spec, VOCABULARY)["blocks.0"]()
    assert frozen_in(block, torch.float32)
    assert published(spec, "blocks.0", block, torch.float32) is None


def test_stored_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    """A matching digest does not mean that a model can compute with the weights."""
    spec, store = LoraSpec(TransformerSpec(2, 1, 16, 4, 32, 0.0), rank=2), FrozenStore(tmp_path)
    (name, own), *_ = parts_in(spec).items()
    integers = {key: each.to(torch.int32) for key, each in own.items()}
    parts = FrozenParts({name: store.add(integers)}, spec, VOCABULARY, torch.float32, [store])
    with pytest.raises(WireError, match=f"frozen weights of '{name}' have other"):
        parts.find(name)


def test_quantised_weights_are_used_even_if_they_cannot_be_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").touch()  # no folder can be made there
    spec = LoraSpec(model(tmp_path, "llama", "causal"), rank=2, quantization="nf4")
    found = parts_of(spec, FrozenStore(tmp_path / "full"))["blocks.1"]
    assert digest(found) == parts_of(spec, FrozenStore(tmp_path / "store")).digests["blocks.1"]
    assert "will be made again" in caplog.text and "make room" in caplog.text
