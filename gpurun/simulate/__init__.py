"""Replay a trace through the same scheduler as `gpurun submit`."""
