"""The register of solvers: every name has a solver, and libraries are loaded only on use."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collapipe.errors import ConfigError
from collapipe.state import AffineLaw, DeviceProfile, MemoryBudget, SharingLaw
from optim.problem import LATENCIES, ClusterProblem, Latency
from optim.solvers import CLUSTER_SOLVERS, cluster_solver, round_solver
from optim.verify import verify_cluster

ROOT = Path(__file__).parents[2]
LOADED = "import sys, optim.solvers; print([m for m in ('scipy', 'cvxpy') if m in sys.modules])"


@pytest.mark.parametrize("name", CLUSTER_SOLVERS)
def test_every_solver_names_itself_in_its_certificate(name: str) -> None:
    laws = [AffineLaw(0.1 * k, 0.1, 0.0, 0.2) for k in (1, 2, 3)]
    devices = tuple(DeviceProfile(f"device-{k}", law) for k, law in enumerate(laws))
    problem = ClusterProblem(devices, 6, 16, 16, "overlap")
    solution = cluster_solver(name)(problem, np.random.default_rng(0))
    verify_cluster(solution, problem)
    assert solution.certificate.solver == name
    assert callable(round_solver(name))


@pytest.mark.parametrize("name", CLUSTER_SOLVERS)
@pytest.mark.parametrize("latency", LATENCIES)
def test_every_solver_plans_devices_that_take_no_time(name: str, latency: Latency) -> None:
    """More micro-batches let a device hold more blocks, so that fewer devices suffice."""
    memory = MemoryBudget(8.0, 0.0, 1.0, 0.5)
    law, sharing = AffineLaw(0.0, 0.0, 0.0, 0.0), SharingLaw(0.0, memory=memory)
    devices = (DeviceProfile(f"d{k}", law, memory=memory, sharing=sharing) for k in range(4))
    problem = ClusterProblem(tuple(devices), 4, 6, 4, latency)
    solution = cluster_solver(name)(problem, np.random.default_rng(0))
    verify_cluster(solution, problem)
    assert solution.best.latency_s == 0 and len(solution.front) == 1


def test_only_the_papers_solver_has_its_own_round_solver() -> None:
    assert round_solver("paper") is not round_solver("exact")
    assert round_solver("gpipe") is round_solver("exact")


def test_an_unknown_name_is_refused() -> None:
    for solver in (cluster_solver, round_solver):
        with pytest.raises(ConfigError, match="solver exat: must be one of exact, shared"):
            solver("exat")


def test_importing_the_register_does_not_load_scipy_and_cvxpy() -> None:
    command = [sys.executable, "-c", LOADED]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip() == "[]"
