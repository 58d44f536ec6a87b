"""A device's daemon is light: what it imports, and what must be installed for it."""

import ast
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from device_cluster import Work, daemons, device_name, plan_of
from device_process import ROOT, TELLING, DeviceProcess, device_process
from huggingface import VOCABULARY, batch_for, spec_of
from packaging.utils import canonicalize_name
from requirements_files import installed, required

from benchmarks.device_footprint import footprint, sides
from collapipe.models.lora import LoraSpec
from collapipe.models.split import ModelSpec

HEAVY = {"flwr", "hydra", "omegaconf", "datasets", "cvxpy", "scipy", "matplotlib", "ray"}
HEAVY |= {"pandas", "sklearn", "tensorboard"}
FOR_SOME_MODELS = {"transformers", "peft", "tokenizers", "huggingface_hub"}


def held(device: DeviceProcess, spec: ModelSpec, work: Work) -> bool:
    """Whether a round with a segment there and one here has the bits of one thread."""
    plan = plan_of([device_name(0), device_name(1)], (1, spec.num_blocks - 1))
    with daemons(1) as others:
        mine = replace(work, spec=spec)
        return mine.remote(plan, [device, *others]).equals(mine.inline(plan))


def tops(modules: Iterable[str]) -> set[str]:
    """Names of packages."""
    return {module.partition(".")[0] for module in modules}


def test_a_daemon_and_our_own_blocks_import_little() -> None:
    with device_process(program=TELLING) as device:
        assert not tops(device.modules()) & (HEAVY | FOR_SOME_MODELS)
        assert held(device, Work().spec, Work())
        loaded = device.modules()
        assert not tops(loaded) & (HEAVY | FOR_SOME_MODELS | {"sympy"})
        assert "torch._dynamo" not in loaded  # torch's compiler: seconds and 76 MB


@pytest.mark.thorough
def test_an_idle_daemon_takes_little_more_than_torch_and_grpc(tmp_path: Path) -> None:
    """How long it takes to start, which depends on what else runs, is for the benchmark."""
    imports, daemon = (footprint(each).memory_mb for each in sides(tmp_path).values())
    assert daemon <= 1.15 * imports


@pytest.mark.thorough
def test_what_the_file_installs_is_enough(tmp_path: Path) -> None:
    """For our own blocks, and those of transformers with peft's adapters: nothing else of what is
    installed here can be imported, and each import of our files has its line in the file."""
    environment = {"PYTHONPATH": f"{ROOT}:{installed(['hf'], tmp_path / 'site')}"}
    site = {"python": ["-S"], "environment": environment}
    bert = Work(vocabulary=VOCABULARY, batch=batch_for("tokens"))
    with device_process(program=TELLING, **site) as device:  # type: ignore[arg-type]
        assert held(device, Work().spec, Work())
        assert held(device, spec_of(tmp_path, "bert", "tokens"), bert)
        loaded = device.modules()
        assert "transformers" in loaded and "peft" not in loaded
        assert held(device, LoraSpec(spec_of(tmp_path, "bert", "tokens")), bert)
        loaded = device.modules()
    assert "peft" in loaded and not tops(loaded) & HEAVY
    listed = {canonicalize_name(each.name) for each in required("hf")}
    providers = packages_distributions()
    for library in imported_by_ours(loaded):
        assert {canonicalize_name(each) for each in providers[library]} & listed, library


def imported_by_ours(modules: Iterable[str]) -> set[str]:
    """Libraries that the files of our ``modules`` import, anywhere in them."""
    found = set[str]()
    for module in modules:
        file = ROOT / (module.replace(".", "/") + ".py")
        for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
            if isinstance(node, ast.Import):
                found |= tops(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= tops([node.module or ""])
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    return found - ours - sys.stdlib_module_names
