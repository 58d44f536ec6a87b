"""What bounds how much a model says of any one unit: clipping, noise, and what both are worth."""
