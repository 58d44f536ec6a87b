"""A daemon imports few libraries and needs few installed packages."""

import ast
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from device_cluster import Work, daemons, device_name, plan_of
from device_process import MODULES_PROGRAM, ROOT, DeviceProcess, device_process
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
    """Whether a round on ``device`` and a local daemon has the bits of one thread."""
    plan = plan_of([device_name(0), device_name(1)], (1, spec.num_blocks - 1))
    with daemons(1) as others:
        mine = replace(work, spec=spec)
        return mine.remote(plan, [device, *others]).equals(mine.inline(plan))


def top_packages(modules: Iterable[str]) -> set[str]:
    """The top-level packages of modules."""
    return {module.partition(".")[0] for module in modules}


def test_a_daemon_with_our_blocks_imports_no_heavy_library() -> None:
    with device_process(program=MODULES_PROGRAM) as device:
        assert not top_packages(device.modules()) & (HEAVY | FOR_SOME_MODELS)
        assert held(device, Work().spec, Work())
        loaded = device.modules()
        assert not top_packages(loaded) & (HEAVY | FOR_SOME_MODELS | {"sympy"})
        assert "torch._dynamo" not in loaded  # torch's compiler takes seconds and 76 MB


@pytest.mark.thorough
def test_an_idle_daemon_needs_at_most_15_percent_more_memory_than_its_imports(
    tmp_path: Path,
) -> None:
    """The benchmark measures the start time, which depends on other processes."""
    imports, daemon = (footprint(each).memory_mb for each in sides(tmp_path).values())
    assert daemon <= 1.15 * imports


@pytest.mark.thorough
def test_the_requirements_file_installs_all_that_a_daemon_needs(tmp_path: Path) -> None:
    """Our blocks, and blocks of transformers with and without peft's adapters, train with only
    these packages. The file lists each library that our files import."""
    environment = {"PYTHONPATH": f"{ROOT}:{installed(['hf'], tmp_path / 'site')}"}
    site = {"python": ["-S"], "environment": environment}
    bert = Work(vocabulary=VOCABULARY, batch=batch_for("tokens"))
    with device_process(program=MODULES_PROGRAM, **site) as device:  # type: ignore[arg-type]
        assert held(device, Work().spec, Work())
        assert held(device, spec_of(tmp_path, "bert", "tokens"), bert)
        loaded = device.modules()
        assert "transformers" in loaded and "peft" not in loaded
        assert held(device, LoraSpec(spec_of(tmp_path, "bert", "tokens")), bert)
        loaded = device.modules()
    assert "peft" in loaded and not top_packages(loaded) & HEAVY
    listed = {canonicalize_name(each.name) for each in required("hf")}
    providers = packages_distributions()
    for library in imported_by_ours(loaded):
        assert {canonicalize_name(each) for each in providers[library]} & listed, library


def imported_by_ours(modules: Iterable[str]) -> set[str]:
    """The libraries that our ``modules`` import anywhere in their files."""
    found = set[str]()
    for module in modules:
        file = ROOT / (module.replace(".", "/") + ".py")
        for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
            if isinstance(node, ast.Import):
                found |= top_packages(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= top_packages([node.module or ""])
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    return found - ours - sys.stdlib_module_names
