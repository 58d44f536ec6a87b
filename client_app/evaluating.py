"""A unit's evaluation: the whole model on the unit's own rows of a split."""

from client_app.control_unit import cached_per_unit
from collapipe.config import Settings
from collapipe.models.split import SplitModel, build_empty
from collapipe.runs.rows import load_held_out
from collapipe.statistics import Statistics
from collapipe.tasks.evaluation import Evaluator
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import Split


def evaluate(
    settings: Settings,
    unit: int,
    tokenizer: str,
    split: Split,
    weights: Tensors,
    fixed: Tensors,
) -> Statistics | None:
    """Return statistics of the model's answers on the unit's rows, or None if it has no rows.

    ``tokenizer`` is packed; ``fixed`` are the frozen weights, on the unit's device. Raises
    ``DataError``, ``ConfigError``, ``NonFiniteLossError`` or ``CancelledRoundError``.
    """
    evaluator = _evaluator(settings, unit, tokenizer, split)
    if evaluator is None:
        return None
    spec, vocabulary = settings.model, Tokenizer.unpack(tokenizer).vocabulary
    device = settings.unit_device
    own = {name: tensor.to(device) for name, tensor in weights.items()}
    return evaluator.statistics(build_empty(lambda: SplitModel(spec, vocabulary), fixed | own))


@cached_per_unit
def _evaluator(settings: Settings, unit: int, tokenizer: str, split: Split) -> Evaluator | None:
    rows = load_held_out(settings, unit, split)
    if rows is None:
        return None
    return Evaluator(settings.task, rows, Tokenizer.unpack(tokenizer), apart=True)
