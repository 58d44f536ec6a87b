"""An inventory: somebody's boxes in a YAML file."""
