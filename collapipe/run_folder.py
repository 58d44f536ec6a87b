"""The folder of a run: what it was configured by, what it measured, and what it learned."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from collapipe import __version__
from collapipe.config import Settings, load_saved
from collapipe.errors import ConfigError
from collapipe.models.part import Tensors
from collapipe.models.split import SplitModel, build_empty
from collapipe.tasks.tokenizer import Tokenizer

_LOADING = {
    "format": "safetensors",
    "weights": "model.safetensors",
    "tokenizer": "tokenizer.json",
    "configuration": "../config.yaml",
    "load": "collapipe.run_folder.load_model(RUN_DIR) gives settings, model and tokenizer",
    "names": "embedding.* of the control unit, blocks.N.* of the segments, head.* of the server",
}


class RunFolder:
    """Files of one run. Raises ``ConfigError`` where the folder cannot be written or is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            (self.path / "model").mkdir(parents=True, exist_ok=True)
            used = (self.path / "metrics.jsonl").exists()  # what never trained may go
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            cause = error.strerror or error
            raise ConfigError(f"hydra.run.dir={path}: cannot be written ({cause})") from error
        if used:
            raise ConfigError(f"hydra.run.dir={path}: holds a run already; choose another folder")

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """``config.yaml``: every value of the run, resolved, and the version."""
        head = f"# CollaPipe {__version__}\n"
        text = head + OmegaConf.to_yaml(OmegaConf.create(dict(tree)))
        _replace(self.path / "config.yaml", text.encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``."""
        text = json.dumps({"version": __version__, **summary}, indent=2, allow_nan=False) + "\n"
        _replace(self.path / "summary.json", text.encode())

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        """The tokeniser and how to load the model beside it."""
        tokenizer.save(self.path / "model" / "tokenizer.json")
        text = json.dumps({"version": __version__, **_LOADING}, indent=2) + "\n"
        _replace(self.path / "model" / "model.json", text.encode())

    def write_weights(self, weights: Tensors) -> None:
        """The model as it is now, in place of the one before."""
        target = self.path / "model" / "model.safetensors"
        partial = target.with_suffix(".partial")
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        partial.replace(target)


def load_model(
    run_dir: Path, trusted: Sequence[str] = ()
) -> tuple[Settings, SplitModel, Tokenizer]:
    """A run's settings, trained model and tokeniser; plug-ins of ``trusted`` packages, too.

    Raises ``ConfigError`` for another folder.
    """
    config, model_dir = run_dir / "config.yaml", run_dir / "model"
    weights, words = model_dir / "model.safetensors", model_dir / "tokenizer.json"
    for file in (config, weights, words):
        if not file.is_file():
            raise ConfigError(f"{run_dir}: not the folder of a run that trained, {file} is missing")
    settings = load_saved(config, trusted)
    tokenizer = Tokenizer.load(words)
    try:
        model = build_empty(
            lambda: SplitModel(settings.model, tokenizer.vocabulary), load_file(weights)
        )
    except (SafetensorError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"{weights}: not the weights of this run's model ({cause})") from error
    assert isinstance(model, SplitModel)
    return settings, model.eval(), tokenizer


def initial_model(settings: Settings, tokenizer: Tokenizer) -> SplitModel:
    """The untrained model, a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = SplitModel(settings.model, tokenizer.vocabulary)
    return model.to(getattr(torch, settings.pipeline.dtype))


def _replace(path: Path, content: bytes) -> None:
    """Write all of a file or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
