"""Jobs: from recipe to job spec, the states of a job, the job store.

recipe, recipe_keys, recipe_values
                     YAML and flags, read and checked
spec                 what a person asked for, as frozen values
record               what became of it, and which changes are allowed
store, folder        the job store: one folder for each job
events               what each attempt left for people and the history
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """``gpurun.jobs`` is this package once anything has imported it; ``gpurun.jobs()`` is a part of the Python API."""

    def __call__(self, *states: str, everybody: bool = False) -> Any:
        """Return this user's jobs: see `gpurun.api.asking.jobs`."""
        return import_module("gpurun.api.asking").jobs(*states, everybody=everybody)  # a room above: only by its name


sys.modules[__name__].__class__ = _CallablePackage
