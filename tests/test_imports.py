"""What text outside the package imports from gpurun exists: benchmarks, recipes, documents, and code that tests run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

TOP = Path(__file__).parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "recipes", "tests")
IMPORT = re.compile(r"^ *from (gpurun[\w.]*) import (\([^)]*\)|[\w, ]+)$", re.MULTILINE)


def missing(text: str) -> Iterator[str]:
    """What a text imports from gpurun, also in code that it quotes, and that is not there."""
    for module, listed in IMPORT.findall(text):
        there = importlib.import_module(module) if is_there(module) else None
        names = [name.split(" as ")[0].strip() for name in re.sub(r"#.*", "", listed).strip("()\n ").split(",")]
        for name in filter(None, names):
            if not (hasattr(there, name) or is_there(f"{module}.{name}")):
                yield f"{module}.{name}"


def is_there(module: str) -> bool:
    """Whether a module exists; False also below a module that is no package."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_what_is_imported_exists():
    files = [path for name in FOLDERS for path in (TOP / name).rglob("*") if path.suffix in (".py", ".md")]
    found = {str(path.relative_to(TOP)): wrong for path in files if (wrong := list(missing(path.read_text())))}
    assert len(files) > 500 and found == {}


def test_a_missing_name_is_seen():
    assert list(missing("from gpurun.jobs.store import JobStore, nothing\n")) == ["gpurun.jobs.store.nothing"]
    assert list(missing("x\n  from gpurun.nowhere import one\n")) == ["gpurun.nowhere.one"]
    assert list(missing("from gpurun.jobs import (\n    store,  # a module\n    spec as s,\n)\n")) == []
