"""Sweeps: one recipe over a set of parameters. Each point is a trial, and each trial a job.

`space` defines the points, `search` chooses the next ones (with Optuna, if it must guess), `trials` has the results,
and `judge` interprets a job's end. `store` keeps everything in ``sweeps/ID``. The `conductor`, a small process for each
sweep, chooses points, submits their jobs and reads their reports. It may die at any moment: the journal has its
progress, and the next command starts a new one.
"""
