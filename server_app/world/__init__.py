"""The simulated world of a run: the conditions of devices and channels in each round."""
