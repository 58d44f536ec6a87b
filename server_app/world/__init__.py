"""The world around a run: what devices and channels are like in each round."""
