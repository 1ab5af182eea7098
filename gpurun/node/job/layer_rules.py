"""Names of what an attempt's ranks write beside their code. Pure: both sides use them."""

from typing import Tuple

TARGET = "/workspace"
"""Where ranks see their code."""
CODE = "workspace"
"""In a job's folder on a host: the copy of the workdir, which no rank changes."""
FILLED = "filled"
"""A file beside what is written: from its mtime to its ctime, gpurun itself copied the code there."""
PREFIX = "gpurun-layer-"
BESIDE = "@workspace"
"""In a job's outputs: what its ranks write beside their code."""


def volume_name(job: str, attempt: int) -> str:
    """Return the name of an attempt's volume; the same on every host of the gang."""
    return "%s%s-%d" % (PREFIX, job, attempt)


def is_beside(path: str) -> bool:
    """Return whether an output was written beside the code."""
    return path == BESIDE or path.startswith(BESIDE + "/")


def is_rubbish(parts: Tuple[bytes, ...]) -> bool:
    """Return whether nobody misses it after a restart: Python makes it again."""
    return b"__pycache__" in parts or parts[-1].endswith((b".pyc", b".pyo"))
