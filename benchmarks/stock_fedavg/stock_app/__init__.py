"""Stock Flower, which sends arrays to clients and back and averages them."""
