"""Check reported labels, so that no unit can make the others train on invented labels."""

from collections import Counter
from collections.abc import Mapping

from collapipe.errors import WireError, one_line
from collapipe.tasks.task import Task
from collapipe.wire.messages import Failure, RowsReply


def unfit_labels(told: Mapping[int, RowsReply], task: Task) -> dict[int, Failure]:
    """Return a failure for each node whose labels the task does not allow.

    With ``task.labels``, these are the nodes that report a label that is not listed. Otherwise the
    node with the most labels that no other node reports is removed, until at most
    ``task.max_labels`` labels are left.
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
