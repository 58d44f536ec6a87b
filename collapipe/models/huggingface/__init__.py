"""Models of the transformers library by name, taken apart along the seam of ``models.split``."""
