"""The rounds of a run: planning, messages, checks and aggregation."""
