"""Labels that units report: a unit cannot have all others train on labels that it has invented."""

from collections import Counter
from collections.abc import Mapping

from collapipe.errors import WireError, one_line
from collapipe.tasks.task import Task
from collapipe.wire.messages import Failure, RowsReply


def unfit_labels(told: Mapping[int, RowsReply], task: Task) -> dict[int, Failure]:
    """The nodes whose labels the task does not allow, and why.

    With listed labels, those that report another. Without, as long as the run has more than
    ``task.max_labels``, the node with the most labels that no other node reports.
    """
    if (listed := task.listed_labels) is not None:
        return {
            node: _failure(f"reported the label {min(odd)!r}, which task.labels does not list")
            for node, reply in told.items()
            if (odd := reply.labels.keys() - set(listed))
        }
    left, unfit = dict(told), dict[int, Failure]()
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
