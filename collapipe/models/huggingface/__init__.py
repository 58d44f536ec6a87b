"""Models of the transformers library by name, split into the parts of ``models.split``."""
