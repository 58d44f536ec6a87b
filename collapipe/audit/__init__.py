"""What the edge server of a run could read of the units' texts: attacks, and how far they come."""
