"""Sub-problem 1: split a cluster's blocks over its devices."""
