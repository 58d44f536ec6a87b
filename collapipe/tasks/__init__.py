"""Tasks: rows, tokeniser, batches and metric."""
