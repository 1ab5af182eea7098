"""Decide what a gang's state means: its ends, their causes, and the next step. Pure."""
