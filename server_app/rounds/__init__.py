"""The rounds of a run: what is decided, sent, checked and learned."""
