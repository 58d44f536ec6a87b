"""What a run leaves behind for people and tools to read."""
