"""A run's records for people and tools: progress, metrics, summary and shards."""
