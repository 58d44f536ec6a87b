"""The decoder's side: the port that activations come to, and the heads that learn from them."""
