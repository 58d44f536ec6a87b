"""A run's model: build the initial one, or load the trained one from the run's folder."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from collapipe.config import Settings, load_saved
from collapipe.errors import ConfigError, one_line
from collapipe.models.frozen import whole
from collapipe.models.kept import to_dtype
from collapipe.models.split import SplitModel, build_empty
from collapipe.runs.base import base_of, take_adapters
from collapipe.runs.folder import check_there, weights_file
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, check_tokenizer


@dataclass(frozen=True)
class Trained:
    """What a run has trained: ``weights`` by their names in the split model, read from ``file``."""

    settings: Settings
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    file: Path

    def model(self) -> SplitModel:
        """Return the model that holds ``weights``. Raises ``ConfigError`` if they do not fit it."""
        vocabulary = self.tokenizer.vocabulary
        with self.fitting():
            model = build_empty(lambda: SplitModel(self.settings.model, vocabulary), self.weights)
        return model.eval()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Convert torch's errors about weights of another model into ``ConfigError``."""
        try:
            yield
        except RuntimeError as error:
            raise _refusal(self.file, error) from error


def load_model(
    run_dir: Path, trusted: Sequence[str] = (), unit: int | None = None
) -> tuple[Settings, SplitModel, Tokenizer]:
    """Load a run's settings, trained model and tokenizer, see ``load_trained``."""
    trained = load_trained(run_dir, trusted, unit)
    return trained.settings, trained.model(), trained.tokenizer


def load_trained(run_dir: Path, trusted: Sequence[str] = (), unit: int | None = None) -> Trained:
    """Load what a run has trained; plug-ins may be of ``trusted`` packages.

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
    file = model_dir / weights_file(unit)
    check_there(run_dir, file)
    tokenizer, blocks = read_tokenizer(model_dir), settings.model.num_blocks
    base = base_of(run_dir, settings, tokenizer.vocabulary)
    try:
        trained = load_file(file)
    except (SafetensorError, RuntimeError) as error:
        raise _refusal(file, error) from error
    if (count := len(trained) + len(base)) < blocks:  # check the claimed number before building
        raise _refusal(file, f"{count} tensors for {blocks} blocks")
    return Trained(settings, whole(base) | trained, tokenizer, file)


def _refusal(file: Path, cause: object) -> ConfigError:
    return ConfigError(
        f"{file}: not the weights of this run's model ({str(cause).splitlines()[0]})"
    )


def _check_unit(run_dir: Path, settings: Settings, unit: int | None) -> None:
    """Raise ``ConfigError`` for a ``unit`` of a run that averages, or if it has no model of it."""
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
        template = None if rest["chat"] is None else ChatTemplate(**rest["chat"])
        if not all(isinstance(token, str) for token in asdict(special_tokens).values()):
            raise TypeError("a special token that is no text")
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        why = one_line(error)
        raise ConfigError(f"{known}: does not describe a tokeniser ({why}); restore it") from error
    try:
        text = words.read_text(encoding="utf-8")
        check_tokenizer(text)
        return Tokenizer(text, special_tokens, labels, template)
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{words}: not a tokeniser ({one_line(error)})") from error


def initial_model(settings: Settings, tokenizer: Tokenizer) -> SplitModel:
    """Build the model with which training begins, a function of the seed and of ``adapter.path``.

    Raises ``ConfigError`` if the adapters there are not this model's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        model = SplitModel(settings.model, tokenizer.vocabulary)
    take_adapters(settings, model.state_dict())
    return to_dtype(model, getattr(torch, settings.pipeline.dtype))
