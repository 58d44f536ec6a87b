"""``collapipe plan``: an inventory's plan as a table, a chart or JSON."""
