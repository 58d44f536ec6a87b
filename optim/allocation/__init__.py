"""Sub-problem 2: which clusters take part, on which channel, at which power."""
