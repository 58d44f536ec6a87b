"""Tasks: data, tokeniser, batches, loss and metric."""
