"""Docker images: find what hosts lack, ship it, verify it."""
