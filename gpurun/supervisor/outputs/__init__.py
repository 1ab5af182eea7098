"""Copy a job's outputs to the head."""
