"""Rows from folders, files and the hub, and how they become splits and shards."""
