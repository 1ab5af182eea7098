"""How a job's rate grows with its GPUs: what was measured, and what that predicts.

This room is pure: measured runs (`samples`) and shapes of gangs (`shape`) go in, predictions with ranges come out.
"""
