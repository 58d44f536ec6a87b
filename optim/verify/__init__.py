"""Whether an answer keeps every constraint and its certificate, found without solving again.

Every formula is written out once more here, in other words than the solvers': a slip on one side
shows instead of hiding on both. The tests also hold each round's lower bound against answers near
it (``tests/optim/refutation.py``); for clusters ``verify_cluster`` does so itself.
"""

from optim.verify.cluster import verify_cluster
from optim.verify.plan import verify_plan
from optim.verify.round import verify_round

__all__ = ["verify_cluster", "verify_plan", "verify_round"]
