"""Sweeps: one recipe over a set of parameters. Each point is a trial, and each trial a job.

`space` says what points there are, `search` which come next (by Optuna, where it must be guessed), `trials` what
became of each, `judge` what a job's end means. `store` keeps all of it in ``sweeps/ID``; the `conductor` is a small
process, one for each sweep, that asks for points, submits their jobs and reads what they report. It may die at any
moment: the journal says how far it was, and the next command starts it again.
"""
