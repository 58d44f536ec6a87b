"""Verify an answer's constraints and certificate without solving the problem again.

Every formula is implemented independently of the solvers, so that an error on one side is detected.
``verify_cluster`` also compares the lower bound with neighbouring answers, and checks its witness
if there is one; for rounds the tests compare neighbours (``tests/optim/refutation.py``).
"""

from optim.verify.cluster import verify_cluster
from optim.verify.plan import verify_plan
from optim.verify.round import verify_round

__all__ = ["verify_cluster", "verify_plan", "verify_round"]
