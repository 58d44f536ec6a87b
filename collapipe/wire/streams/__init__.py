"""Streams of frames between machines, over gRPC or a TCP connection of their own."""
