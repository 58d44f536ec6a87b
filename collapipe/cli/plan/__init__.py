"""``collapipe plan``: print an inventory's plan as a table or JSON, or draw it."""
