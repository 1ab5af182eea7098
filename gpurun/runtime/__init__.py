"""What user code may import inside its container."""
