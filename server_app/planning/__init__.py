"""The plan of each round, and the state from which the next round is planned."""
