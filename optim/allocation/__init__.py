"""Sub-problem 2: choose the clusters that take part, their channels and their powers."""
