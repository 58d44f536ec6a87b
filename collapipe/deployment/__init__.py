"""Deployed federations, on machines of several owners: server folder, owners' files, checks."""

PORT, LINK_PORT = 8000, 8001  # for units: messages, and activations
