"""Plans rounds: pure functions from clusters' states to plans, without torch and Flower.

The names below are where a reader starts; docs/optim.md has an example. Each loads with its first
use, so that ``import optim`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optim.allocation.exact import exact_allocation
    from optim.dssra import Dssra
    from optim.library import plan_round
    from optim.partition.exact import exact_partition
    from optim.planner import Planner, RoundRequest
    from optim.problem import ClusterProblem, RoundOptions, RoundProblem
    from optim.verify import verify_cluster, verify_plan, verify_round

__all__ = [
    "ClusterProblem",
    "Dssra",
    "Planner",
    "RoundOptions",
    "RoundProblem",
    "RoundRequest",
    "exact_allocation",
    "exact_partition",
    "plan_round",
    "verify_cluster",
    "verify_plan",
    "verify_round",
]

_MODULES = {
    "optim.allocation.exact": ("exact_allocation",),
    "optim.dssra": ("Dssra",),
    "optim.library": ("plan_round",),
    "optim.partition.exact": ("exact_partition",),
    "optim.planner": ("Planner", "RoundRequest"),
    "optim.problem": ("ClusterProblem", "RoundOptions", "RoundProblem"),
    "optim.verify": ("verify_cluster", "verify_plan", "verify_round"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'optim' has no attribute {name!r}")
