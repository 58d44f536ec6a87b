"""The forms of weights: narrower than they compute in, quantised, or without values."""
