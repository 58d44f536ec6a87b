"""A Flower ClientApp is a control unit."""
