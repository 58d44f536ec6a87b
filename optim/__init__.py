"""Plan rounds: pure functions from clusters' states to plans, without torch and Flower.

docs/how-to/planner-library.md has an example of the names below. Each name is imported at its first
use, so that ``import optim`` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optim.allocation.exact import exact_allocation as exact_allocation
    from optim.dssra import Dssra as Dssra
    from optim.library import plan_cluster as plan_cluster
    from optim.library import plan_round as plan_round
    from optim.partition.exact import exact_partition as exact_partition
    from optim.planner import Planner as Planner
    from optim.planner import RoundRequest as RoundRequest
    from optim.problem import ClusterProblem as ClusterProblem
    from optim.round.problem import RoundOptions as RoundOptions
    from optim.round.problem import RoundProblem as RoundProblem
    from optim.verify import verify_cluster as verify_cluster
    from optim.verify import verify_plan as verify_plan
    from optim.verify import verify_round as verify_round

_MODULES = {
    "ClusterProblem": "problem",
    "Dssra": "dssra",
    "Planner": "planner",
    "RoundOptions": "round.problem",
    "RoundProblem": "round.problem",
    "RoundRequest": "planner",
    "exact_allocation": "allocation.exact",
    "exact_partition": "partition.exact",
    "plan_cluster": "library",
    "plan_round": "library",
    "verify_cluster": "verify",
    "verify_plan": "verify",
    "verify_round": "verify",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'optim' has no attribute {name!r}")
    return getattr(import_module(f"optim.{_MODULES[name]}"), name)
