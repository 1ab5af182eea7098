"""What a function and its module say of how ranks find each other."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from gpurun.head.reading import MOST_BYTES, clues_in
from gpurun.launch.launchers.choosing.choice import ProgramClues, agreed

MOST_NAMES = 10_000


def clues_of_call(function: Callable[..., Any]) -> ProgramClues:
    """Return what a function says of its launcher; if it says nothing, what its module imports.

    A notebook is a module without a file: what its cells have imported counts.
    """
    while isinstance(function, functools.partial):
        function = function.func
    shown = str(getattr(function, "__qualname__", type(function).__name__))
    own = clues_in(_source(function), shown, None)
    if agreed(own.clues) is None:
        module = sys.modules.get(str(getattr(function, "__module__", "")))
        text = _source(module) if module is not None else ""
        file = getattr(module, "__file__", None)
        folder = Path(file).parent if isinstance(file, str) and text else None
        names = () if module is None or text else _names(module)
        own = clues_in(text, getattr(module, "__name__", shown), folder, names)
    return replace(own, function=shown)


def _source(what: Any) -> str:
    """Return the source of a function or module; "" if it has none, such as a builtin's, or is too large."""
    try:
        text = textwrap.dedent(inspect.getsource(what))
    except (OSError, TypeError, SyntaxError, IndexError, UnicodeError):
        return ""
    return text if len(text) <= MOST_BYTES else ""


def _names(module: ModuleType) -> list[str]:
    """Return the dotted names of what is in a module."""
    found = list[str]()
    for value in list(vars(module).values())[:MOST_NAMES]:
        if isinstance(value, ModuleType):
            found.append(value.__name__)
        elif isinstance(value, type | FunctionType) and isinstance(value.__module__, str):
            found.append(f"{value.__module__}.{value.__name__}")
    return found
