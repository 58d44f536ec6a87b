"""Tasks: their rows, tokeniser, batches and metric."""
