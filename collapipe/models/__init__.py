"""Models that come apart: embedding (control unit), blocks (devices), head (server)."""
