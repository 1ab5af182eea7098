"""Names of a user's caches of models and kernels on a host. Pure: both sides use them."""

from __future__ import annotations

import re
from typing import Mapping, Tuple

# Names of what an attempt's ranks write beside their code. Pure: both sides use them.


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


CACHES_TARGET = "/run/gpurun-caches"
"""Where ranks see them."""
VARIABLES: Mapping[str, str] = {
    "XDG_CACHE_HOME": CACHES_TARGET,
    "HF_HOME": CACHES_TARGET + "/huggingface",
    "TORCH_HOME": CACHES_TARGET + "/torch",
    "TRITON_CACHE_DIR": CACHES_TARGET + "/triton",
    "TORCHINDUCTOR_CACHE_DIR": CACHES_TARGET + "/inductor",
    "CUDA_CACHE_PATH": CACHES_TARGET + "/cuda",
}
ALONE: Mapping[str, str] = {"TORCH_EXTENSIONS_DIR": "/tmp/torch_extensions"}  # noqa: S108 (inside the container)
"""What would follow XDG_CACHE_HOME, and must not be shared: a killed build leaves a lock, and all later jobs wait."""
FOLLOW_XDG = frozenset({"HF_HOME", "TORCH_HOME", *ALONE})
"""What is below XDG_CACHE_HOME by default: whoever sets that says where these are."""
OWNER = re.compile(r"[0-9a-f]{16}-\d{1,10}\Z", re.ASCII)
"""Whose caches: the id of a head's state directory, and the user's number there."""
_CHECKPOINTS = (b"torch", b"hub", b"checkpoints")


def depth_of(parts: Tuple[bytes, ...]) -> int:
    """Return how deep the entry lies that a path of a cache belongs to. An entry goes as a whole.

    A model is an entry: half of one is a broken one. So is everything that one compiler has left.
    """
    if parts[:3] == _CHECKPOINTS:
        return 4
    return 3 if parts[0] in (b"huggingface", b"torch") else 1
