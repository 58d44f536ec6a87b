"""The model on the units' own rows: what each unit counts is checked and added up."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from flwr.app import RecordDict

from collapipe.config import Settings
from collapipe.errors import WireError
from collapipe.formatting import counted
from collapipe.report import UnitsEvaluation
from collapipe.statistics import Statistics
from collapipe.tasks.evaluation import APART, evaluation_of
from collapipe.tasks.task import Task
from collapipe.tensors import Tensors, chosen
from collapipe.wire import records
from collapipe.wire.messages import EvaluateReply, EvaluateRequest, Failure, Split
from server_app.attendance import NOT_ASKED
from server_app.rounds.global_model import GlobalModel
from server_app.units import Units

_MOST_LOSS = 700.0  # per token: of no more is the perplexity a number
_MOST_COUNT = 2**40  # so that no sum over units is too large for an int64


def evaluate_on_units(
    units: Units,
    excluded: Collection[int],
    settings: Settings,
    labels: Sequence[str],
    model: GlobalModel,
    split: Split,
) -> UnitsEvaluation:
    """Ask all units but the ``excluded`` ones; whose answer cannot be used is left out.

    Where units have models of their own, each evaluates its own.
    """
    asked = [unit for unit in sorted(units.nodes) if unit not in excluded]
    names = model.names(with_head=True)
    sent = chosen(model.weights, names)
    request = EvaluateRequest(split, settings.federation.round_timeout_s)
    replies = units.evaluate(_contents(request, asked, sent, model), len(labels))
    answers = {
        unit: _checked(answer, unit, settings.task, labels) for unit, answer in replies.items()
    }
    not_asked = sum(isinstance(r, Failure) and r.kind == NOT_ASKED for r in replies.values())
    bytes_down = (len(asked) - not_asked) * records.num_bytes(sent)
    return _summed(answers, settings, bytes_down)


def _contents(
    request: EvaluateRequest, asked: Collection[int], sent: Tensors, model: GlobalModel
) -> dict[int, RecordDict]:
    """A message for each unit; ``sent`` are those weights that it gets, of the average."""
    average = records.pack_tensors(sent)
    weights = {
        unit: records.pack_tensors({name: own[name] for name in sent})
        for unit, own in model.own_models.items()
        if unit in asked
    }
    return {unit: records.pack(request, weights=weights.get(unit, average)) for unit in asked}


def _summed(
    answers: Mapping[int, Statistics | Failure | None], settings: Settings, bytes_down: int
) -> UnitsEvaluation:
    failures = {u: f"{a.kind}: {a.message}" for u, a in answers.items() if isinstance(a, Failure)}
    told = {unit: each for unit, each in answers.items() if not isinstance(each, Failure)}
    rows = {unit: 0 if each is None else each.rows for unit, each in told.items()}
    result = UnitsEvaluation(rows, failures, bytes_down=bytes_down)
    found = [each for each in told.values() if each is not None]
    if not found:
        return result
    how = f"{APART}, of {counted(len(found), 'unit')}"
    if not settings.framework.aggregate:
        how += " with models of their own"
    evaluation = evaluation_of(settings.task, reduce(add, found), how)
    return replace(result, loss=evaluation.loss, metric=evaluation.score)


def _checked(
    answer: EvaluateReply | Failure, unit: int, task: Task, labels: Sequence[str]
) -> Statistics | Failure | None:
    """What a unit found, None where it has no rows; a failure where no rows can give it."""
    if isinstance(answer, Failure):
        return answer
    found, fault = answer.statistics, ""
    if answer.unit != unit:
        fault = f"answered as unit {answer.unit}"
    elif found is not None and not possible(found, task, labels):
        fault = "reported rows, losses or counts that no evaluation of the unit can have"
    return Failure(WireError.__name__, fault) if fault else found


def possible(found: Statistics, task: Task, labels: Sequence[str]) -> bool:
    """Whether some rows can have these statistics: then figures can be computed from them, and from
    a sum of such."""
    return (
        found.tokens > 0
        and all(math.isfinite(part) for part in found.losses)
        and all(abs(part) <= _MOST_LOSS * found.tokens for part in found.losses)
        and 0 <= found.loss <= _MOST_LOSS
        and bool(((found.counts >= 0) & (found.counts < _MOST_COUNT)).all())
        and task.possible(found, labels)
    )
