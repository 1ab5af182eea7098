"""The life of one job, step by step."""
