"""Compute what an environment consists of, and the key that names it, before the build."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.environments.inside import ENVIRONMENT, PLACE
from gpurun.environments.pip_settings import PipSettings, users_settings, with_folder, with_index
from gpurun.environments.project import read_lock, read_project
from gpurun.environments.requirements import Requirements, read_requirements, text_of
from gpurun.errors import BadInput
from gpurun.images.engine import HeadImage
from gpurun.jobs.spec import Environment

NAME = "gpurun/environment"
LABEL, PACKAGES, BASE = "gpurun.environment", "gpurun.environment.packages", "gpurun.environment.base"
WHEELS = f"{PLACE}/wheels"
_FORMAT = 1
"""Counted up when other bytes come of the same key."""


@dataclass(frozen=True)
class EnvironmentPlan:
    """One environment, not yet built.

    Attributes:
        constraints: constraints of the recipe and of the user's pip.
        wheels: a folder on the head that is the only index; None = the network.
    """

    base: HeadImage
    requirements: Requirements
    settings: PipSettings
    constraints: tuple[str, ...]
    wheels: Path | None
    secret: Path | None
    key: str

    @property
    def reference(self) -> str:
        """Return the name of the image."""
        return f"{NAME}:{self.key[:16]}"

    @property
    def options(self) -> tuple[str, ...]:
        """Return pip's options after the requirements. If one requirement has a hash, pip requires a hash for each."""
        locked = ("--no-deps",) if self.requirements.locked else ()
        return (*locked, *(("-c", f"{PLACE}/in/constraints.txt") if self.constraints else ()))


def plan_environment(
    wanted: Environment, base: HeadImage, architecture: str, environ: Mapping[str, str]
) -> EnvironmentPlan:
    """Read the user's input and compute the environment's name.

    Raises:
        BadInput: a file cannot be read, or contains something that gpurun does not pass on.
    """
    requirements = requirements_of(wanted)
    users = users_settings(environ)
    wheels: Path | None = None
    named: object = None
    if wanted.index is None:
        settings = users
    elif re.match("https?://", wanted.index):
        settings = with_index(users, wanted.index)
    else:
        wheels = Path(wanted.index)
        named, settings = _wheels(wheels), with_folder(WHEELS)
    settings.check()
    if wanted.index is not None and requirements.has_index:
        raise BadInput(
            "both the requirements file and the recipe name a package index", where=wanted.path,
            hint="remove the index from the requirements file or from the recipe",
        )  # fmt: skip
    constraints = (*requirements.constraints, *(_users_constraints(users) if wanted.index is None else ()))
    if requirements.locked:
        constraints = ()
    told = {
        "format": _FORMAT, "base": base.id, "architecture": architecture, "place": ENVIRONMENT,
        "requirements": requirements.lines, "locked": requirements.locked, "constraints": constraints,
        "index": settings.named, "wheels": named,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return EnvironmentPlan(
        base, requirements, replace(settings, values=_without_constraints(settings)), constraints, wheels,
        None if wanted.secret is None else Path(wanted.secret), key,
    )  # fmt: skip


def requirements_of(wanted: Environment) -> Requirements:
    """Read what the user wants installed. Raises BadInput if a file cannot be used."""
    path = Path(wanted.path)
    if wanted.kind == "lock":
        return read_lock(path)
    return read_project(path) if wanted.kind == "project" else read_requirements(path)


def _wheels(folder: Path) -> list[tuple[str, str]]:
    """Return name and digest of each file that pip may read."""
    if not folder.is_dir():
        raise BadInput("the package index is neither a folder nor an http URL", where=str(folder))
    try:
        with os.scandir(folder) as scanned:
            names = sorted(entry.name for entry in scanned if entry.is_file(follow_symlinks=False))
        return [(name, _digest(folder / name)) for name in names]
    except OSError as error:
        raise BadInput(
            f"gpurun cannot read the package index: {error.strerror}", where=str(error.filename or folder)
        ) from None


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()


def _users_constraints(users: PipSettings) -> tuple[str, ...]:
    paths = [Path(word) for word in users.values.get("constraint", ()) if Path(word).is_absolute()]
    return tuple(line for path in paths if path.is_file() for line in text_of(path).splitlines())


def _without_constraints(settings: PipSettings) -> dict[str, tuple[str, ...]]:
    """Return the settings for pip's file. Constraints go into another file."""
    return {key: words for key, words in settings.values.items() if key != "constraint"}
