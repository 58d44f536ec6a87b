"""``collapipe report``: what a run's folder tells, as one page."""
