"""The paper's figures that need no training, computed from the model of time and energy."""
