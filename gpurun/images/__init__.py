"""Docker images: what is missing where, shipping it, verifying it."""
