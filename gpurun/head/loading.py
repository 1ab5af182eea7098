"""Load all code of a process that outlives commands at its start, so that ``pip install -U`` may replace it meanwhile.

A process that imported a module later would mix two versions. `gpurun.head.children` starts each such process with
`load`; a process of one version may start one of another, so the name and the arguments of `load` stay.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

SETTLED_S = 2.0
"""Files that changed this recently may belong to an installation that is not finished: between two files of a package,
pip and uv take milliseconds."""


def load(module: str) -> Callable[[list[str]], int]:
    """Import a module as `whole` does; return its `main`.

    Raises:
        Exception: anything that an import raises while its files are being replaced.
        ImportError: a file of this process has just changed.
    """
    begun_s = time.time()
    found = whole(module)
    if is_fresh(newest_change_s(), begun_s, time.time()):
        raise ImportError(
            "gpurun's program files have just changed, so this process may have loaded files of two versions",
            name=module,
        )
    main: Callable[[list[str]], int] = found.main
    return main


def whole(module: str) -> ModuleType:
    """Import a module, or a package's ``__main__``, and all that its functions import later: the module's `LATE`."""
    found = import_module(module)
    if hasattr(found, "__path__"):
        found = import_module(f"{module}.__main__")
    for name in found.LATE:
        import_module(name)
    return found


def newest_change_s() -> float:
    """Return when the last of this process's modules changed on disk.

    Raises:
        FileNotFoundError: one was removed.
    """
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return max((os.stat(file).st_ctime for file in files if file and os.path.isabs(file)), default=0.0)  # noqa: PTH116, PTH117


def is_fresh(changed_s: float, begun_s: float, now_s: float) -> bool:
    """Return whether a change was during the imports or just before. Pure.

    A change in the future says nothing: the clock was set back.
    """
    return begun_s - SETTLED_S < changed_s <= now_s
