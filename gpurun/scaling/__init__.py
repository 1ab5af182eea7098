"""Predict how a job's rate grows with its GPUs, from measurements.

This package is pure: it turns measured runs and shapes of gangs (`model`) into predictions with ranges.
"""
