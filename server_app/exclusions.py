"""Find and report nodes that cannot take part in a run, and refuse a run with too few others."""

import logging
from collections import Counter
from collections.abc import Mapping

from collapipe.errors import (
    CollaPipeError,
    ConfigError,
    DataError,
    RoundFailedError,
    WireError,
    few_of,
    one_line,
)
from collapipe.tasks.task import Task
from collapipe.wire.messages import Failure, RowsReply
from server_app.places import Places

_log = logging.getLogger(__name__)
_OF_ALL = ConfigError.__name__, DataError.__name__  # causes that all units may have in common


def warn_excluded(places: Places, failures: Mapping[int, Failure]) -> None:
    """Log each node that failed, and why."""
    certified = places.certified() if failures else {}
    for node, failure in failures.items():
        name = places.of_node(node, certified)
        _log.warning("%s is excluded: %s: %s", name, failure.kind, failure.message)


def concern_all(failures: Mapping[int, Failure]) -> bool:
    """Whether some unit cannot use the run's options or data."""
    return any(failure.kind in _OF_ALL for failure in failures.values())


def too_few(
    places: Places, able: int, there: int, least: int, failures: Mapping[int, Failure]
) -> CollaPipeError:
    """Return the error of a run in which only ``able`` units can begin, of ``least`` required.

    It begins with the cause if no unit can begin and the cause is the same for all.
    """
    error = ConfigError if concern_all(failures) else RoundFailedError
    if not able and len(same := {*failures.values()}) == 1:
        (each,) = same
        kind = "" if each.kind in _OF_ALL else f"{each.kind}: "
        return error(f"{kind}{each.message} (0 of {there} units can begin)")
    return error(
        f"{able} of {there} units can begin, at least {least} must (federation.min_units): "
        f"{causes(places, failures)}"
    )


def causes(places: Places, failures: Mapping[int, Failure]) -> str:
    """Describe the causes of failures, each with the nodes that it affects."""
    affected, certified = dict[str, list[str]](), places.certified()
    for node, each in failures.items():
        name = places.of_node(node, certified)
        affected.setdefault(f"{each.kind}: {each.message}", []).append(name)
    return few_of(f"{few_of(names, ', ')}: {cause}" for cause, names in affected.items())


def unfit_labels(replies: Mapping[int, RowsReply], task: Task) -> dict[int, Failure]:
    """Return a failure for each node whose labels the task does not allow: none may invent any.

    With ``task.labels``, these are the nodes that report a label that is not listed. Otherwise the
    node with the most labels that no other node reports is removed, until at most
    ``task.max_labels`` labels are left.
    """
    if (listed := task.listed_labels) is not None:
        return {
            node: _failure(f"reported the label {min(unlisted)!r}, which task.labels does not list")
            for node, reply in replies.items()
            if (unlisted := reply.labels.keys() - set(listed))
        }
    left, unfit = dict(replies), dict[int, Failure]()
    while len(holders := Counter(label for each in left.values() for label in each.labels)) > (
        task.max_labels
    ):
        own = {n: sum(holders[label] == 1 for label in r.labels) for n, r in left.items()}
        node = max(own, key=lambda node: (own[node], len(left[node].labels), node))
        reply = left.pop(node)
        unfit[node] = _failure(
            f"reported {len(reply.labels):,} labels, {own[node]:,} of which no other unit has, and "
            f"all units together may have {task.max_labels:,}; list them (task.labels), or raise "
            "task.max_labels"
        )
    return unfit


def _failure(fault: str) -> Failure:
    return Failure(WireError.__name__, one_line(fault))
