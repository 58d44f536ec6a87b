"""Modules in a user's folder or PYTHONPATH do not shadow CollaPipe's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from federated import TINY

SHADOWS = ("optim", "pipeline", "conf", "client_app", "server_app")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with modules and packages that are named like CollaPipe's."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} is the user\\'s')\n")
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text("raise RuntimeError('in path')\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'path'}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.thorough
def test_the_command_runs_in_a_folder_with_modules_of_the_same_names(folder: Path) -> None:
    options = [*TINY, "federation.rounds=1", f"hydra.run.dir={folder / 'run'}"]
    ended = python(folder, "-m", "collapipe", "run", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "run" / "model" / "model.safetensors").exists()


def test_an_already_imported_module_of_the_same_name_is_an_error(folder: Path) -> None:
    (folder / "pipeline.py").write_text("")
    ended = python(folder, "-c", "import pipeline, collapipe; collapipe.train([])")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert str(folder / "pipeline.py") in last and "ConfigError" in last
