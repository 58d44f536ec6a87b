"""Sub-problem 1: how a cluster's blocks are split over its devices."""
