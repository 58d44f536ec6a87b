"""``collapipe device``: the daemon, and the commands that check and measure devices."""
