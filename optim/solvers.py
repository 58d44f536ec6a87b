"""Find solvers by name. A solver's module is imported at its first use."""

from collections.abc import Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import cast

from collapipe.errors import ConfigError
from optim.problem import ClusterSolver
from optim.round.problem import RoundSolver

CLUSTER_SOLVERS: Mapping[str, str] = MappingProxyType(
    {
        "exact": "optim.partition.exact:exact_partition",
        "shared": "optim.sharing.exact:shared_partition",
        "asteroid": "optim.sharing.baselines:asteroid",
        "adaptis": "optim.sharing.baselines:adaptis",
        "paper": "optim.partition.algorithm2:paper_partition",
        "vanilla_fl": "optim.partition.baselines:vanilla_fl",
        "pipeline": "optim.partition.baselines:pipeline_even",
        "titanic": "optim.partition.baselines:titanic",
        "no_segment_scheduling": "optim.partition.baselines:no_segment_scheduling",
        "gpipe": "optim.partition.baselines:gpipe",
        "pipedream": "optim.partition.baselines:pipedream",
        "pipeedge": "optim.partition.baselines:pipeedge",
    }
)
"""Module and function of each solver of a cluster."""


def cluster_solver(name: str) -> ClusterSolver:
    """Return the solver of Sub-1 called ``name``. Raises ``ConfigError`` if it is unknown."""
    if name not in CLUSTER_SOLVERS:
        raise ConfigError(f"solver {name}: must be one of {', '.join(CLUSTER_SOLVERS)}")
    return cast(ClusterSolver, resolve_name(CLUSTER_SOLVERS[name]))


def round_solver(name: str) -> RoundSolver:
    """Return the round's solver for the cluster solver called ``name``.

    ``paper`` has a separate round solver. The others do not choose channels and power, so the exact
    solver is used on their fronts. Raises ``ConfigError`` if the name is unknown.
    """
    cluster_solver(name)
    place = "algorithm3:paper_allocation" if name == "paper" else "exact:exact_allocation"
    return cast(RoundSolver, resolve_name(f"optim.allocation.{place}"))
