"""Access control: a cluster's authority, its members' certificates, and mutual TLS."""
