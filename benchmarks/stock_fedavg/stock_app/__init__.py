"""Stock Flower, which sends arrays to and fro and averages them."""
