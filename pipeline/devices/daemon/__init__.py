"""The device's end. It depends on torch and gRPC, not on Flower."""
