"""The virtual queues after a round (eqs. 23–29), in which scheduled units may have failed."""

from collections.abc import Collection

from collapipe.plan import RoundPlan


def next_queues(
    queues: tuple[float, ...], plan: RoundPlan, finished: Collection[int]
) -> tuple[float, ...]:
    """Return Y_n(t+1). A scheduled unit that failed gets the queue of an idle unit if the plan has
    ``idle_queues``. A plan without queues changes nothing."""
    if not plan.queues:
        return queues
    idle, failed = plan.idle_queues or plan.queues, _failed(plan, finished)
    return tuple(idle[n] if n in failed else queue for n, queue in enumerate(plan.queues))


def next_error_queues(
    queues: tuple[float, ...], plan: RoundPlan, finished: Collection[int]
) -> tuple[float, ...]:
    """Return Q_n(t+1). The queue of a scheduled unit that failed shrinks by 1, down to 0; in a
    skipped round this holds for every unit. A plan without error queues changes nothing."""
    before, failed = queues or (0.0,) * len(plan.error_queues), _failed(plan, finished)
    spared = tuple(max(queue - 1.0, 0.0) for queue in before)
    if not plan.error_queues:
        return queues if plan.clusters else spared
    return tuple(spared[n] if n in failed else queue for n, queue in enumerate(plan.error_queues))


def _failed(plan: RoundPlan, finished: Collection[int]) -> set[int]:
    return {cluster.unit for cluster in plan.clusters} - {*finished}
