"""A federation on machines of several owners: its server's folder, its units' files, its checks."""
