"""Does: runs a plan's segments inside one cluster. Knows torch, not Flower."""
