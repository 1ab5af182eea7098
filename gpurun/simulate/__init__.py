"""Replay of a trace through the same scheduler."""
