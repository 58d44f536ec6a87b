"""``collapipe deploy``: set up, check and try a federation on machines of several owners."""
