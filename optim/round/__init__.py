"""The choices of a round across units: participants, channels, powers, and their effect."""
