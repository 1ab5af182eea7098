"""What runs as process 1 of a lab's host, or of the head's engine: standard library only."""
