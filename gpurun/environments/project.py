"""Read a project's dependencies from its ``pyproject.toml`` or ``uv.lock``, without running code of the project."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpurun.environments.requirements import Requirements, checked, parse, text_of
from gpurun.errors import BadInput

LOCK, PROJECT = "uv.lock", "pyproject.toml"
_UV_LIMIT_S = 60.0
_EXPORT = (
    "export", "--frozen", "--offline", "--no-config", "--no-dev", "--no-emit-project", "--no-emit-workspace",
    "--no-header", "--no-annotate", "--color", "never", "--format", "requirements-txt",
)  # fmt: skip


def read_project(folder: Path) -> Requirements:
    """Return the dependencies that a project's ``pyproject.toml`` lists (PEP 621).

    Raises:
        BadInput: the file is missing or not TOML, or a build must compute the dependencies.
    """
    path = folder / PROJECT
    document = _toml(text_of(path), path)
    project = document.get("project")
    if not isinstance(project, dict):
        raise BadInput(
            "the file has no table [project]", where=str(path), hint="list the packages in a requirements file"
        )
    if "dependencies" in (project.get("dynamic") or ()):
        raise BadInput(
            "the project computes its dependencies only during its build", where=str(path),
            hint="list the dependencies in a requirements file",
        )  # fmt: skip
    listed = project.get("dependencies", [])
    if not isinstance(listed, list) or not all(isinstance(each, str) and each.strip() for each in listed):
        raise BadInput("the key 'dependencies' must be a list of strings", where=str(path))
    where = f"{path}: dependencies"
    lines = tuple(value for each in listed for _, option, value in _requirements(each, where))
    return checked(Requirements(lines), where)


def read_lock(path: Path) -> Requirements:
    """Return the packages that a ``uv.lock`` pins, with hashes, without development packages. ``uv`` reads it and runs
    nothing.

    Raises:
        BadInput: uv is not installed, or cannot read the lock.
    """
    if path.name != LOCK:
        raise BadInput(f"the lock file must have the name {LOCK}", where=str(path))
    if not path.is_file():
        raise BadInput("the lock file does not exist, or is not a file", where=str(path))
    try:
        done = subprocess.run(
            [_uv(), *_EXPORT, "--directory", str(path.parent)],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=_UV_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BadInput(f"uv did not read the lock file within {_UV_LIMIT_S:g} s", where=str(path)) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BadInput(f"uv cannot read the lock file: {' '.join(said[-3:])[:400]}", where=str(path))
    lines = tuple(value for _, option, value in _requirements(done.stdout.decode(errors="replace"), str(path)))
    return checked(Requirements(lines, locked=True), str(path))


def _requirements(text: str, where: str) -> list[tuple[str, str, str]]:
    found = list(parse(text, where))
    for place, option, _ in found:
        if option:
            raise BadInput(
                f"the list of dependencies contains the option {option}, which is not a package", where=place
            )
    return found


def _uv() -> str:
    try:
        return str(importlib.import_module("uv").find_uv_bin())
    except (ImportError, FileNotFoundError):
        pass
    found = shutil.which("uv")
    if found is None:
        raise BadInput("gpurun needs uv on the head to read a uv.lock", hint="install uv: pip install 'gpurun[lock]'")
    return found


def _toml(text: str, path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document: dict[str, Any] = toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the file is not TOML: {str(error)[:200]}", where=str(path)) from None
    return document
