"""Commands that use the trained model of a run."""
