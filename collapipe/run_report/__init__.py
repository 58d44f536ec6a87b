"""``collapipe report``: show a run's folder as one page."""
