"""Requests to Docker's API for the containers of a build. Pure, except that it looks which local indexes exist."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from gpurun.environments.inside import ENVIRONMENT, PLACE
from gpurun.environments.pip_settings import PipSettings
from gpurun.environments.plan import BASE, LABEL, PACKAGES, WHEELS, EnvironmentPlan

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST_PROCESSES = 4096
_NETRC, SCRATCH = f"{PLACE}/netrc", f"{PLACE}/scratch"
_LOCAL = ("index-url", "extra-index-url", "find-links", "cert", "client-cert")


@dataclass(frozen=True)
class BuildContainer:
    """Settings and mounts of the build's container.

    Attributes:
        settings: pip's settings, with paths inside the container.
        mounts: (path on the head, path in the container, writable).
    """

    settings: PipSettings
    mounts: tuple[tuple[str, str, bool], ...]


def build_container(plan: EnvironmentPlan, work: Path, pip: Path | None) -> BuildContainer:
    """Return the container of a build in the folder `work`; `pip` is the folder of the head's own pip."""
    settings, found = _localised(plan.settings)
    mounts = [
        (str(work / "in"), f"{PLACE}/in", False),
        (str(work / "scratch"), SCRATCH, True),
        (str(work / "environment"), ENVIRONMENT, True),
        *((source, target, False) for source, target in found.items()),
    ]
    mounts += [(str(plan.wheels.resolve()), WHEELS, False)] if plan.wheels else []
    mounts += [(str(plan.secret.resolve()), _NETRC, False)] if plan.secret else []
    mounts += [(str(pip), f"{PLACE}/pip/pip", False)] if pip else []
    return BuildContainer(settings, tuple(mounts))


def create_request(plan: EnvironmentPlan, made: BuildContainer, user: str) -> dict[str, Any]:
    """Return the body of ``POST /containers/create`` for the build.

    The container runs as the submitting user, without capabilities, and sees only the files of the head that it needs.
    Docker keeps no log.
    """
    environ = {
        "PIP_CONFIG_FILE": f"{PLACE}/in/pip.conf", "HOME": SCRATCH, "TMPDIR": SCRATCH, "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PIP_ROOT_USER_ACTION": "ignore",
        **({"NETRC": _NETRC} if plan.secret else {}),
    }  # fmt: skip
    return {
        "Image": plan.base.id,
        "User": user,
        "WorkingDir": "/",
        "Entrypoint": ["python3"],
        "Cmd": [f"{PLACE}/in/inside.py", *plan.options],
        "Env": [f"{name}={value}" for name, value in environ.items()],
        "HostConfig": {
            "Mounts": [
                {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not writable}
                for source, target, writable in made.mounts
            ],
            "NetworkMode": "none" if plan.settings.is_offline else "host",
            "UsernsMode": "host",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["label=disable", "no-new-privileges"],
            "PidsLimit": MOST_PROCESSES,
            "LogConfig": {"Type": "none"},
        },
    }


def layer_request(plan: EnvironmentPlan, packages: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of ``POST /containers/create`` for the container to commit. It never runs."""
    facts: Mapping[str, Any] = plan.base.facts
    path = next((each[5:] for each in facts.get("Env") or () if each.startswith("PATH=")), USUAL_PATH)
    command = {} if facts.get("Cmd") or facts.get("Entrypoint") else {"Cmd": ["/bin/sh"]}
    return {
        "Image": plan.base.id,
        "Env": [f"PATH={ENVIRONMENT}/bin:{path}", f"VIRTUAL_ENV={ENVIRONMENT}"],
        "Labels": {LABEL: plan.key, BASE: plan.base.reference, PACKAGES: json.dumps(packages)},
        **command,
    }


def _files_of(index: Path) -> Iterator[Path]:
    """Yield the folders beside an index that have its files.

    Mirrors such as bandersnatch's call it ``packages``. Others call it ``files``, which may be a person's own folder,
    so the page of a package must link to it.
    """
    if (packages := index.parent / "packages").is_dir():
        yield packages
    page = next(index.glob("*/index.html"), None)
    with suppress(OSError):
        if page is not None and b"../../files/" in page.read_bytes() and (files := index.parent / "files").is_dir():
            yield files


def _localised(settings: PipSettings) -> tuple[PipSettings, dict[str, str]]:
    """Return the settings with paths inside the container, and a map from paths on the head to paths in the container.

    gpurun mounts an index alone: the build runs code of packages, and the folder above may be somebody's home. Only
    the index's own files beside it come too.
    """
    mounts: dict[str, str] = {}
    folders: dict[Path, str] = {}

    def mount(path: Path, target: str) -> str:
        return mounts.setdefault(str(path.resolve()), target)

    def seen(word: str, key: str) -> str:
        is_url = word.startswith("file://")
        path = Path(unquote(urlsplit(word).path) if is_url else word)
        if not path.is_absolute() or not path.exists():
            return word
        if key.endswith("index-url"):
            folder = folders.setdefault(path.parent.resolve(), f"{PLACE}/local/index{len(folders)}")
            there = mount(path, f"{folder}/{path.name}")
            for files in _files_of(path):
                mount(files, f"{folder}/{files.name}")
        else:
            there = mount(path, f"{PLACE}/local/{len(mounts)}")
        return f"file://{quote(there)}" if is_url else there

    values = {
        key: tuple(seen(word, key) for word in words) if key in _LOCAL else words
        for key, words in settings.values.items()
    }
    return replace(settings, values=values), mounts
