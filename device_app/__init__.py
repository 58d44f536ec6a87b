"""Does: serves a segment of the encoder on an edge box. Knows torch and gRPC, not Flower."""
