"""A recipe's folders in the containers: mounts, outputs and data sets."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpurun.documents.convert import written
from gpurun.jobs.disagreement import Disagreement
from gpurun.jobs.spec import DATA, DataSource, JobSpec

_JOB_OUTPUTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*:outputs((?:/.*)?)\Z")

_KERNEL = ("proc", "sys", "dev", "gpurun", "workspace")
_SYSTEM = ("bin", "boot", "etc", "lib", "lib32", "lib64", "run", "sbin", "usr", "var")


def _container_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path or "\n" in path or ".." in path.split("/"):
        raise ValueError
    if not path.strip("/"):
        raise ValueError("must be a folder below /, such as /checkpoints")
    return path


def _outputs_path(path: str) -> str:
    """Check a folder for outputs. An empty folder of the host hides the image's folder, so the container must not need
    it.
    """
    top, *below = _container_path(path).strip("/").split("/")
    if top in _KERNEL or (top in _SYSTEM and not any(below)):
        copied = "; leave out this key: gpurun copies new files at /workspace in any case" if top == "workspace" else ""
        raise ValueError(f"hides the container's own /{top}{copied}")
    return path


def _mount(text: str) -> tuple[str, str, str]:
    """Parse ``/host/path:/container/path[:ro|rw]``; default: read-only. Raises ValueError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw"):
        raise ValueError
    return _container_path(source), _container_path(target), mode or "ro"


def _data_source(text: str) -> dict[str, str]:
    """Parse ``./folder``, ``host:/path`` or ``JOB:outputs/path``. Raises ValueError."""
    if not text or "\0" in text or "\n" in text:
        raise ValueError
    if text.startswith("host:"):
        return {"kind": "host", "path": _container_path(text.removeprefix("host:"))}
    found = _JOB_OUTPUTS.match(text)
    if found is None:
        return {"kind": "folder", "path": text}
    if ".." in found[1].split("/"):
        raise ValueError("has '..', which leads out of the job's outputs")
    return {"kind": "job", "path": text}


OutputsPath = Annotated[str, written(_outputs_path, "an absolute path such as /checkpoints")]
ContainerPath = Annotated[str, written(_container_path, "an absolute path such as /checkpoints")]
Mount = Annotated[tuple[str, str, str], written(_mount, "a mount such as /host/path:/container/path:ro")]
DataName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", title="a name (letters, digits, '.', '_', '-')")
]
Data = Annotated[
    DataSource,
    written(
        _data_source, "a source of data such as ./data, host:/nfs/data or JOB:outputs/data",
        schema={"type": "string", "minLength": 1},
    ),
]  # fmt: skip


def sources_below(folder: Path, data: Mapping[str, DataSource]) -> dict[str, DataSource]:
    """Return sources of data, with relative paths resolved against `folder`."""
    return {
        name: replace(source, path=str((folder / source.path).absolute())) if source.kind == "folder" else source
        for name, source in data.items()
    }


def check_data(spec: JobSpec) -> None:
    """Refuse a data set whose path in the container is already used, or whose source is not a folder.

    Raises:
        Disagreement: names the data set.
    """
    taken = {target.rstrip("/"): "a mount" for _, target, _ in spec.mounts}
    taken |= {spec.outputs.rstrip("/"): "outputs"} if spec.outputs is not None else {}
    for name, source in spec.data.items():
        if f"{DATA}/{name}" in taken:
            both = f"both {taken[f'{DATA}/{name}']} and the data set {name!r}"
            raise Disagreement(f"{DATA}/{name} is {both}", "data", name)
        if source.kind == "folder" and not stat.S_ISDIR(mode_of(Path(source.path))):
            raise Disagreement(f"the data set {name!r} is not a folder", "data", name, where=source.path)


def mode_of(path: Path) -> int:
    """Return the mode of the file at a path, as stat(2) reports it; 0 if there is none or it cannot be read."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0
