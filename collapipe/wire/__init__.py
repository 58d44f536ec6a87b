"""What travels between processes, as bytes, frames and Flower records."""
