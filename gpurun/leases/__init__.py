"""Ownership of GPUs: lease files, locks, fencing, recovery."""
