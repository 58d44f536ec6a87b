"""Tasks: what is learned from rows; tokeniser, batches and metric."""
