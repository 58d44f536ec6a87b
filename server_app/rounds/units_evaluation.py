"""Evaluate the model on the units' own rows: check each unit's statistics and add them up."""

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
from server_app.questions import apart
from server_app.roster import NOT_ASKED, Roster
from server_app.rounds.global_model import GlobalModel
from server_app.units import Units

_MOST_LOSS = 700.0  # per token; the perplexity of a larger loss overflows
_MOST_COUNT = 2**40  # so that sums over units fit in an int64
_MOST_ROWS = 2**31  # of a unit


def evaluate_on_units(
    units: Units, roster: Roster, labels: Sequence[str], model: GlobalModel, split: Split
) -> UnitsEvaluation:
    """Ask all units that are not excluded; unusable answers become failures.

    If nothing is averaged, each unit evaluates its own model.
    """
    settings, sent = units.settings, chosen(model.weights, model.names(with_head=True))
    asked = [unit for unit in sorted(units.nodes) if unit not in roster.excluded]
    request = EvaluateRequest(split, settings.federation.round_timeout_s)
    replies = units.evaluate(_contents(request, asked, sent, model), len(labels), roster.absent)
    answers = {
        unit: _checked(answer, unit, settings.task, labels) for unit, answer in replies.items()
    }
    not_asked = sum(isinstance(r, Failure) and r.kind == NOT_ASKED for r in replies.values())
    bytes_down = (len(asked) - not_asked) * records.num_bytes(sent)
    return _summed(answers, settings, bytes_down)


def _contents(
    request: EvaluateRequest, asked: Collection[int], sent: Tensors, model: GlobalModel
) -> dict[int, RecordDict]:
    """Build a message for each unit. ``sent`` are the average's weights; a unit with its own model
    gets that model's weights of the same names."""
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
    usable, failed = apart(answers)
    failures = {unit: f"{each.kind}: {each.message}" for unit, each in failed.items()}
    rows = {unit: 0 if each is None else each.rows for unit, each in usable.items()}
    result = UnitsEvaluation(rows, failures, bytes_down=bytes_down)
    found = [each for each in usable.values() if each is not None]
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
    """Return a unit's statistics, or None if it has no rows. Return a failure if the statistics
    are impossible or from another unit."""
    if isinstance(answer, Failure):
        return answer
    found, fault = answer.statistics, ""
    if answer.unit != unit:
        fault = f"answered as unit {answer.unit}"
    elif found is not None and not possible(found, task, labels):
        fault = "reported rows, losses or counts that are impossible for its evaluation"
    return Failure(WireError.__name__, fault) if fault else found


def possible(found: Statistics, task: Task, labels: Sequence[str]) -> bool:
    """Whether these statistics are possible, so that finite figures follow from them and from
    their sums."""
    return (
        0 < found.rows < _MOST_ROWS
        and 0 < found.tokens < _MOST_COUNT
        and all(math.isfinite(part) for part in found.losses)
        and all(abs(part) <= _MOST_LOSS * found.tokens for part in found.losses)
        and 0 <= found.loss <= _MOST_LOSS
        and bool(((found.counts >= 0) & (found.counts < _MOST_COUNT)).all())
        and task.possible(found, labels)
    )
