"""A run with adapters saves its trained weights and the digests of its frozen base model."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from federated import grid_of, settings_of, train
from flwr.app import ArrayRecord
from pretrained import causal_folder, lora_run, lora_settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.models.huggingface.spec import HuggingFaceSpec, _converted
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.runs.model import begin, initial_model, load_model
from collapipe.runs.rows import make_tokenizer
from collapipe.text.tokenizer import Tokenizer
from server_app.rounds.strategy import CollaPipeStrategy

LORA = "adapter=lora", "adapter.rank=2", "federation.checkpoint_every=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A finished run with adapters of the pretrained model; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        lora_run(folder, model, "federation.checkpoint_every=1")
    return folder


def start_of(settings: Settings, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The weights of the whole untrained model."""
    return initial_model(settings, tokenizer).state_dict()


def test_a_run_saves_only_its_trained_weights(finished: Path) -> None:
    """The run's model and checkpoints contain only adapters; the loaded model is complete."""
    own = load_file(finished / "model" / "model.safetensors")
    assert own and all("lora" in name for name in own)
    kept = load_file(finished / "checkpoints" / "latest" / "tensors.safetensors")
    assert all("lora" in name for name in kept if name.startswith("weights/"))
    assert not (finished / "model" / "base").exists()
    settings, trained, tokenizer = load_model(finished)
    first, last = start_of(settings, tokenizer), trained.state_dict()
    same = {name for name in last if torch.equal(last[name], first[name])}
    assert first.keys() == last.keys() and same.isdisjoint(own)
    assert same | own.keys() == last.keys()


def test_a_damaged_base_is_named_once(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says all that a warning before it could."""
    settings = lora_settings(tmp_path / "run", Path(shutil.copytree(model, tmp_path / "llama")))
    vocabulary = make_tokenizer(settings, ()).vocabulary
    file = tmp_path / "llama" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"^model\.name={tmp_path}/llama: cannot read weights"):
        begin(tmp_path / "run", settings, vocabulary)
    assert not caplog.messages


def test_a_missing_or_different_base_is_refused(tmp_path: Path, model: Path) -> None:
    """The error is one line. Once its base is restored, the run loads again."""
    own = tmp_path / "llama"
    shutil.copytree(model, own)
    lora_run(tmp_path / "run", own, "federation.rounds=1")
    expected = load_model(tmp_path / "run")[1].state_dict()
    weights = own / "model.safetensors"
    weights.rename(tmp_path / "aside")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"embedding: its frozen weights .*llama") as caught:
            load_model(tmp_path / "run")
        assert "\n" not in str(caught.value)
        causal_folder(tmp_path / "other", seed=1)
        shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    (tmp_path / "aside").replace(weights)
    again = load_model(tmp_path / "run")[1].state_dict()
    assert all(torch.equal(each, again[name]) for name, each in expected.items())


def test_randomly_drawn_frozen_weights_are_saved_once_in_the_folder(tmp_path: Path) -> None:
    """Each part has a file that is named by its digest."""
    settings = settings_of(tmp_path / "run", [*LORA, "federation.num_units=1"])
    train(grid_of(settings), settings)
    digests = json.loads((tmp_path / "run" / "model" / "base.json").read_text())
    files = {each.stem for each in (tmp_path / "run" / "model" / "base").iterdir()}
    assert files == {*digests.values()} and len(files) == 6
    settings, trained, tokenizer = load_model(tmp_path / "run")
    first = start_of(settings, tokenizer)
    frozen = {name for name, each in trained.state_dict().items() if torch.equal(each, first[name])}
    assert all("lora" not in name for name in frozen) and len(frozen) > 50


def test_a_run_without_digests_is_refused_in_one_line(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "model" / "base.json").unlink()
    with pytest.raises(ConfigError, match=r"base\.json is missing; restore") as caught:
        load_model(tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ({"embedding": "../../secret"}, "must be 64 hex digits"),
        ({"blocks.9": "0" * 64}, r"part 'blocks\.9'"),
        (["embedding"], "not the digests"),
    ],
)
def test_invalid_digests_are_refused(
    tmp_path: Path, finished: Path, digests: object, message: str
) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "model" / "base.json").write_text(json.dumps(digests))
    weights = tmp_path / "run" / "model" / "model.safetensors"
    save_file(load_file(weights), weights)  # without the record, in which the digests differ
    with pytest.raises(CollaPipeError, match=message) as caught:
        load_model(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_run_resumes_only_with_its_own_base(tmp_path: Path, model: Path, finished: Path) -> None:
    """The resumed run equals the uninterrupted run bit for bit; another base is refused."""
    own = tmp_path / "llama"
    shutil.copytree(model, own)
    parts = tmp_path / "parts"
    once = "federation.checkpoint_every=1", "federation.rounds=1"
    lora_run(parts, own, *once)
    lora_run(parts, own, "federation.checkpoint_every=1", resume="000001")
    one, other = (load_file(each / "model" / "model.safetensors") for each in (finished, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())
    causal_folder(tmp_path / "other", seed=1)
    (tmp_path / "other" / "model.safetensors").replace(own / "model.safetensors")
    with pytest.raises(ConfigError, match="removed or changed since the run began"):
        lora_run(parts, own, "federation.checkpoint_every=1", resume="000001")
    assert (parts / "checkpoints" / "000002").is_dir()  # the refused resume removed no checkpoint
    # another run's frozen weights, with the digests of their file
    lora_run(tmp_path / "second", own, "federation.rounds=1")
    shutil.copy(tmp_path / "second" / "model" / "base.json", parts / "model")
    with pytest.raises(ConfigError, match="the frozen weights have changed since the run began"):
        lora_run(parts, own, "federation.checkpoint_every=1", resume="000001")


def test_frozen_parts_are_not_built(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are read from the folder; blocks are built one by one for their adapters."""
    settings = lora_settings(tmp_path / "run", model)
    tokenizer = make_tokenizer(settings, ())
    expected = start_of(settings, tokenizer)
    real = HuggingFaceSpec._filled

    def filled(self: HuggingFaceSpec, name: str, *more: Any) -> torch.nn.Module:
        assert name.startswith("blocks.") or torch.get_default_device().type == "meta"
        return real(self, name, *more)

    monkeypatch.setattr(HuggingFaceSpec, "_filled", filled)
    weights, base = begin(tmp_path / "run", settings, tokenizer.vocabulary)
    assert {*base} == {"embedding", "blocks.0", "blocks.1", "blocks.2", "head"}
    assert weights.keys() == {name for name in expected if "lora" in name}
    assert all(torch.equal(each, expected[name]) for name, each in weights.items())
    assert _converted.cache_info().currsize == 0  # the model was not read as a whole


def test_a_custom_app_passes_and_receives_the_whole_model(tmp_path: Path, model: Path) -> None:
    settings = lora_settings(tmp_path / "run", model, ["federation.rounds=1"])
    tokenizer = make_tokenizer(settings, ())
    arrays = CollaPipeStrategy(settings, tokenizer).initial_arrays()
    names = SplitModel(cast(ModelSpec, settings.model), tokenizer.vocabulary).state_dict().keys()
    assert {*arrays} == names
    results = []
    for given in (arrays, ArrayRecord({n: e + 0 for n, e in arrays.to_torch_state_dict().items()})):
        strategy = CollaPipeStrategy(settings, tokenizer)
        done = strategy.start(grid=grid_of(settings), initial_arrays=given, num_rounds=1)
        assert done.arrays is not None and {*done.arrays} == names
        results.append(done.arrays.to_torch_state_dict())
    for name, each in results[0].items():
        assert torch.equal(each, results[1][name])
        assert torch.equal(each, arrays.to_torch_state_dict()[name]) == ("lora_B" not in name)


@pytest.mark.parametrize(
    "options",
    [
        ["model.quantization=nf4"],
        ["model.dtype=bfloat16", "adapter.last_blocks=1"],
        ["pipeline.dtype=float64"],
    ],
)
def test_a_run_accepts_its_own_initial_arrays(
    tmp_path: Path, model: Path, options: list[str]
) -> None:
    settings = lora_settings(tmp_path / "run", model, options)
    strategy = CollaPipeStrategy(settings, make_tokenizer(settings, ()))
    arrays = strategy.initial_arrays().to_torch_state_dict()
    strategy._take(dict(arrays))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, name: arrays.pop(name), "'embedding.*' is missing"),
        (lambda arrays, name: arrays.update(odd=torch.ones(1)), "'odd' is no weight of the run"),
        (lambda arrays, name: arrays.update({name: arrays[name].half()}), r"float16 \[.*float32"),
        (lambda arrays, name: arrays.update({name: arrays[name][1:]}), r"float32 \[\d+, \d+\], "),
    ],
)
def test_invalid_arrays_and_timeouts_are_refused_before_units_are_asked(
    tmp_path: Path, model: Path, change: Callable[..., object], message: str
) -> None:
    settings = lora_settings(tmp_path / "run", model, [])
    strategy = CollaPipeStrategy(settings, make_tokenizer(settings, ()))
    arrays = strategy.initial_arrays().to_torch_state_dict()
    change(arrays, next(name for name, each in arrays.items() if each.dim() == 2))
    with pytest.raises(ConfigError, match=f"^initial arrays: .*{message}"):
        strategy.start(grid=Mock(), initial_arrays=ArrayRecord(arrays), num_rounds=1)
    for timeout in (0.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"^timeout={timeout}: must be seconds above 0"):
            strategy.start(grid=Mock(), initial_arrays=strategy.initial_arrays(), timeout=timeout)
