"""Segments on other machines: a control unit's side, and what both sides share."""
