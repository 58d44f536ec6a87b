"""A control unit's real devices: which answer, what they measured, and a round on them."""
