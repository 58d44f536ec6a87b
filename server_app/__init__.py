"""The edge server: a Flower ServerApp."""
