"""Serves a segment of the encoder on an edge device. Depends on torch and gRPC, not on Flower."""
