"""A machine that has the pretrained model's files receives only adapters."""

import itertools
import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from device_cluster import daemons
from pretrained import causal_folder, lora_run
from resumed import differing
from run_files import summary_of
from safetensors.torch import load_file
from thorough import chosen
from torch import Tensor
from torch.nn import Parameter

from client_app.node import cached_parts
from collapipe.models import frozen
from collapipe.models.weights import kept
from collapipe.models.weights.quantised import quantise
from collapipe.runs.model import load_model
from collapipe.wire.frozen_store import default_folder
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.daemon.server import Daemon

_MORE = pytest.mark.thorough
NF4 = "model.quantization=nf4"


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A pretrained model's folder; Mixtral's file has separate tensors for each expert."""
    path = causal_folder(tmp_path_factory.mktemp("models") / request.param, family=request.param)
    names = load_file(path / "model.safetensors")
    assert any("experts.3.w1" in name for name in names) == (request.param == "mixtral")
    return path


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list with the quantisation method of each weight that is quantised from its values."""
    seen = list[str]()

    def counted(weight: Tensor, how: str) -> tuple[Tensor, Tensor]:
        if type(weight) in (Tensor, Parameter) and not weight.is_meta:  # it has values
            seen.append(how)
        return quantise(weight, how)

    for module in (frozen, kept):
        monkeypatch.setattr(module, "quantise", counted)
    return seen


def own_weights(run_dir: Path) -> dict[str, Tensor]:
    """The weights in the run's folder."""
    return load_file(run_dir / "model" / "model.safetensors")


def stored(place: str = ".") -> list[Path]:
    """Files in the store of frozen weights, which server and units use, or in its subfolders."""
    return [*default_folder().glob(f"{place}/*.safetensors")]


@pytest.mark.parametrize(
    ("folder", "kept"),
    chosen(
        itertools.product(["llama", "mixtral"], ["model.dtype=auto", "model.dtype=bfloat16", NF4]),
        [("llama", "model.dtype=auto"), ("mixtral", NF4)],
    ),
    indirect=["folder"],
)
def test_units_with_the_folder_receive_only_adapters(
    tmp_path: Path, folder: Path, kept: str
) -> None:
    """Both units receive only adapters, in the first round, too. Only quantised weights, which take
    long to compute, are stored."""
    settings = lora_run(tmp_path, folder, kept)
    adapters = 3 * 2 * 2 * (16 + 16) - 3 * 2 * 8  # rank 2; the values' width is 8
    found = summary_of(tmp_path)
    assert settings.model.num_blocks == 3
    assert found["bytes_down"] == 2 * 2 * 4 * adapters
    assert len(stored()) == (3 if kept == NF4 else 0)
    assert not (tmp_path / "model" / "base").exists()
    assert load_model(tmp_path)[1].state_dict().keys() > own_weights(tmp_path).keys()


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_weights_are_not_quantised_in_each_round(
    tmp_path: Path, folder: Path, quantised: list[str]
) -> None:
    """The server quantises them once; units, evaluation and the next run read the stored result."""
    once = list[int]()
    for rounds in (1, 3):
        quantised.clear()
        cached_parts.cache_clear()  # may hold quantised weights
        lora_run(tmp_path / str(rounds), folder, NF4, f"federation.rounds={rounds}")
        once.append(len(quantised))
        assert set(quantised) <= {"nf4"}
    assert once == [3 * 4, 0]  # 3 blocks of 4 linear layers; the second run quantises no layer


def inventory(file: Path, there: list[Daemon]) -> Path:
    devices = [
        {"name": f"device-{k}", "address": each.address, "flops_per_s": 1e9, "d2d_rate_bps": 1e9}
        for k, each in enumerate(there)
    ]
    clusters = [{"name": "here", "devices": devices}]
    tree = {"batch_size": 4, "model": {"name": "transformer"}, "clusters": clusters}
    file.write_text(json.dumps(tree))  # JSON is valid YAML
    return file


@pytest.mark.parametrize("kept", [pytest.param("model.dtype=auto", marks=_MORE), NF4])
def test_a_device_with_the_folder_receives_no_frozen_weights(
    tmp_path: Path,
    folder: Path,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    quantised: list[str],
) -> None:
    sent, real = list[str](), Replica.packed

    def packed(self: Replica, name: str, keys: Collection[str]) -> Tensor:
        sent.extend(keys)
        return real(self, name, keys)

    monkeypatch.setattr(Replica, "packed", packed)
    own = "federation.num_units=1", "strategy=all", "pipeline.profile=false", "cluster=devices"
    with daemons(2, model=str(folder)) as there:
        file = inventory(tmp_path / "here.yaml", there)
        lora_run(tmp_path / "run", folder, kept, *own, f"cluster.file={file}")
    assert sent and all("lora" in key for key in sent)
    assert len(stored()) == (3 if kept == NF4 else 0)
    # 3 blocks at the server and 3 at devices; round 2 may move 2 more blocks to one device
    assert len(quantised) <= (3 + 3 + 2) * (7 if folder.name == "llama" else 4)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("kept", [pytest.param("model.dtype=auto", marks=_MORE), NF4])
def test_a_device_with_another_folder_receives_the_blocks_that_it_lacks(
    tmp_path: Path, folder: Path, kept: str
) -> None:
    """The run ends with the same bits as a run whose devices have no model folder."""
    other = causal_folder(tmp_path / "other", seed=1, family=folder.name)
    own = "federation.num_units=1", "strategy=all", "pipeline.profile=false", "cluster=devices"
    trained = list[dict[str, Tensor]]()
    for name in (str(other), None):
        with daemons(2, model=name) as there:
            file = inventory(tmp_path / "here.yaml", there)
            run = tmp_path / f"run-{name is None}"
            lora_run(run, folder, kept, *own, f"cluster.file={file}")
        assert len(stored("devices/*")) == 3  # each block on one device
        shutil.rmtree(default_folder())
        trained.append(own_weights(run))
    assert differing(*trained) == []
