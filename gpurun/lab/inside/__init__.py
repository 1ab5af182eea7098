"""Process 1 of a lab's host, and of the head's engine. Uses only the standard library."""
