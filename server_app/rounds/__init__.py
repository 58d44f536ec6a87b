"""The rounds of a run: messages, checks and aggregation."""
