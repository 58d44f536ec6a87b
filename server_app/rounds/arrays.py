"""A run's model as arrays of Flower: the initial ones are checked before a run begins."""

import torch
from flwr.app import ArrayRecord

from collapipe.config import Settings
from collapipe.errors import ConfigError
from collapipe.models.split import SplitModel
from collapipe.models.weights.kept import NARROW
from collapipe.models.weights.without_values import WithoutValues
from collapipe.runs.model import initial_model
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import Vocabulary


def arrays_of(weights: Tensors) -> ArrayRecord:
    """Return an array for each weight. numpy has no bfloat16: such weights become float32."""
    narrow = torch.bfloat16
    wide = {name: each.float() if each.dtype == narrow else each for name, each in weights.items()}
    return ArrayRecord(wide)


def untrained(settings: Settings, tokenizer: Tokenizer) -> Tensors:
    """Return the run's initial model."""
    return dict(initial_model(settings, tokenizer).state_dict())


def fitted(model: Tensors, settings: Settings, vocabulary: Vocabulary) -> Tensors:
    """Return the initial ``model`` with the dtypes of the run's own one. Raises ``ConfigError`` if
    it is another model."""
    with WithoutValues():
        own = SplitModel(settings.model, vocabulary).state_dict()
    _check_form(model, own, getattr(torch, settings.pipeline.dtype))
    narrow = {name: each.dtype for name, each in own.items() if each.dtype in NARROW.values()}
    return {name: each.to(narrow.get(name, each.dtype)) for name, each in model.items()}


def _check_form(model: Tensors, own: Tensors, dtype: torch.dtype) -> None:
    """Raise ``ConfigError`` unless arrays have the names and shapes of the run's ``own`` model, and
    the ``dtype``; narrow weights may have any floating-point dtype."""
    if mismatched := sorted(model.keys() ^ own.keys()):
        fault = "is no weight of the run's model" if mismatched[0] in model else "is missing"
        raise ConfigError(f"initial arrays: {mismatched[0]!r} {fault}; begin with initial_arrays()")
    for name, each in model.items():
        like = own[name]
        wanted = dtype if like.dtype == torch.float32 else like.dtype
        fits = each.is_floating_point() if wanted in NARROW.values() else each.dtype == wanted
        if not fits or each.shape != like.shape:
            raise ConfigError(
                f"initial arrays: {name!r} is {each.dtype} {list(each.shape)}, expected {wanted} "
                f"{list(like.shape)}"
            )
