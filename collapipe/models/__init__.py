"""Split models: embedding (control unit), blocks (devices), head (server)."""
