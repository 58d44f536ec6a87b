"""Text as tokens: the tokeniser, padding, labels."""
