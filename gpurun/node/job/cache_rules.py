"""Names of a user's caches of models and kernels on a host. Pure: both sides use them."""

import re
from typing import Mapping, Tuple

TARGET = "/run/gpurun-caches"
"""Where ranks see them."""
VARIABLES: Mapping[str, str] = {
    "XDG_CACHE_HOME": TARGET,
    "HF_HOME": TARGET + "/huggingface",
    "TORCH_HOME": TARGET + "/torch",
    "TRITON_CACHE_DIR": TARGET + "/triton",
    "TORCHINDUCTOR_CACHE_DIR": TARGET + "/inductor",
    "CUDA_CACHE_PATH": TARGET + "/cuda",
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
