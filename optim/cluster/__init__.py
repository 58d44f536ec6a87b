"""From a cluster's state in a round to its solvers' problem, front and plan."""
