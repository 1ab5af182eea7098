"""Who owns GPUs: lease files, locks, fencing, recovery."""
