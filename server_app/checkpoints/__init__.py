"""What a run needs to go on after it was interrupted: written, read, checked."""
