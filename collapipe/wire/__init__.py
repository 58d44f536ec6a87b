"""Messages between processes: bytes, frames and Flower records."""
