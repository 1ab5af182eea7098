"""Predict how a job's rate grows with its GPUs, from measurements.

This package is pure: it turns measured runs (`samples`) and shapes of gangs (`shape`) into predictions with ranges.
"""
