"""Building what stands in for NVIDIA's software: ``libnvidia-ml.so.1``, from C, once; and the container hook."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gpurun.lab.commands import run
from gpurun.lab.lock import alone
from gpurun.lab.paths import cache

LIBRARY = "libnvidia-ml.so.1"
HOOK = "nvidia-container-runtime-hook"
_HOOK_TEXT = (
    "#!/bin/sh\n# gpurun lab: Docker needs this on its PATH to accept --gpus; there is nothing to inject.\nexit 0\n"
)
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-s", f"-Wl,-soname,{LIBRARY}")


@dataclass(frozen=True)
class StandIn:
    """Files on this machine, and where a host's dynamic linker looks for the library without being told."""

    library: Path
    library_in_host: str
    hook_text: str = _HOOK_TEXT


def build() -> StandIn:
    """Compile the library unless this very source has been compiled before; about a second with gcc."""
    source = resources.files(__package__).joinpath("nvml.c").read_bytes()
    folder = cache() / "lab-stand-in" / hashlib.sha256(source + repr(_FLAGS).encode()).hexdigest()[:16]
    library = folder / LIBRARY
    with alone(folder / "lock"):
        if not library.exists():
            draft = folder / "draft.so"
            run(["gcc", *_FLAGS, "-x", "c", "-", "-o", str(draft)], stdin=source.decode())
            draft.rename(library)
    triplet = run(["gcc", "-print-multiarch"]).strip()
    return StandIn(library, f"/usr/lib/{triplet}/{LIBRARY}" if triplet else f"/usr/lib/{LIBRARY}")
