"""A run's model: build the initial one, or load the trained one from the run's folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from collapipe.config import Settings, load_saved
from collapipe.errors import ConfigError, one_line
from collapipe.models.split import SplitModel, build_empty
from collapipe.runs.folder import check_there, weights_file
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, check_tokenizer


def load_model(
    run_dir: Path, trusted: Sequence[str] = (), unit: int | None = None
) -> tuple[Settings, SplitModel, Tokenizer]:
    """Load a run's settings, trained model and tokenizer; plug-ins may be of ``trusted`` packages.

    ``unit`` selects a unit's model in a run that did not average. Raises ``ConfigError`` if the
    folder has no valid model of that unit or run.
    """
    config, model_dir = run_dir / "config.yaml", run_dir / "model"
    check_there(run_dir, config, model_dir / "tokenizer.json", model_dir / "model.json")
    settings = load_saved(config, trusted)
    if not settings.framework.train:
        raise ConfigError(
            f"{run_dir}: has no model, since it was run with framework.train=false; name a run "
            "that trained"
        )
    _check_unit(run_dir, settings, unit)
    weights = model_dir / weights_file(unit)
    check_there(run_dir, weights)
    tokenizer = read_tokenizer(model_dir)
    try:
        tensors = load_file(weights)
        if len(tensors) < settings.model.num_blocks:  # check the claimed number before building
            raise RuntimeError(f"{len(tensors)} tensors for {settings.model.num_blocks} blocks")
        model = build_empty(lambda: SplitModel(settings.model, tokenizer.vocabulary), tensors)
    except (SafetensorError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"{weights}: not the weights of this run's model ({cause})") from error
    return settings, model.eval(), tokenizer


def _check_unit(run_dir: Path, settings: Settings, unit: int | None) -> None:
    """Raise ``ConfigError`` if ``unit`` does not fit the run.

    A run that averages has one model and takes None; other runs take a unit that has a model.
    """
    units = settings.federation.num_units
    if settings.framework.aggregate:
        if unit is not None:
            raise ConfigError(
                f"--unit {unit}: the models of {run_dir} were averaged into one; leave --unit out"
            )
    elif unit is None:
        raise ConfigError(
            f"{run_dir}: the units' models were not averaged (framework.aggregate=false); "
            f"--unit N picks one of 0 … {units - 1}"
        )
    elif not 0 <= unit < units:
        raise ConfigError(f"--unit {unit}: {run_dir} is a run of units 0 … {units - 1}")
    elif not (run_dir / "model" / weights_file(unit)).is_file():
        raise ConfigError(
            f"--unit {unit}: {run_dir} has no model of that unit, which finished no round; name "
            "another"
        )


def read_tokenizer(model_dir: Path) -> Tokenizer:
    """Read the tokeniser from a run's folder ``model``. Raises ``ConfigError`` if it is invalid."""
    words, known = model_dir / "tokenizer.json", model_dir / "model.json"
    try:
        rest = json.loads(known.read_text(encoding="utf-8"))
        special_tokens = SpecialTokens(**rest["marks"])
        labels = [str(label) for label in rest["labels"]]
        if not all(isinstance(token, str) for token in asdict(special_tokens).values()):
            raise TypeError("a special token that is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = one_line(error)
        raise ConfigError(f"{known}: has no marks and labels of a tokeniser ({why})") from error
    try:
        text = words.read_text(encoding="utf-8")
        check_tokenizer(text)
        return Tokenizer(text, special_tokens, labels)
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{words}: not a tokeniser ({one_line(error)})") from error


def initial_model(settings: Settings, tokenizer: Tokenizer) -> SplitModel:
    """Build the untrained model, a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = SplitModel(settings.model, tokenizer.vocabulary)
    return model.to(getattr(torch, settings.pipeline.dtype))
