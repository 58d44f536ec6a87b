"""A federation on machines of several owners: its server's folder, its units' files, its checks."""

PORT, LINK_PORT = 8000, 8001  # for units: messages, and activations
