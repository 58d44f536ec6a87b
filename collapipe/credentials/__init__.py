"""Who may speak to whom: an authority of a cluster, certificates of its members, mutual TLS."""
