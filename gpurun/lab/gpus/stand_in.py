"""Build the stand-ins for NVIDIA's software: ``libnvidia-ml.so.1`` from C, and the container hook."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gpurun.lab.commands import run
from gpurun.lab.lock import alone
from gpurun.lab.paths import cache

LIBRARY = "libnvidia-ml.so.1"
HOOK = "nvidia-container-runtime-hook"
HOOK_TEXT = """\
#!/bin/sh
# gpurun lab: Docker looks for this program before it accepts --gpus. There is no driver to inject.
exit 0
"""
_SOURCES = Path(__file__).with_name("nvml")
_FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}")


@dataclass(frozen=True)
class StandIn:
    """The library on this machine, and its path in a host, where the dynamic linker finds it by default."""

    library: Path
    library_in_host: str


def build() -> StandIn:
    """Compile the library unless these exact sources are already compiled; takes about a second with gcc.

    Raises:
        LabFailed: gcc failed; the message contains its output.
    """
    sources = sorted(_SOURCES.glob("*.[ch]"))
    content = b"".join(source.read_bytes() for source in sources) + repr(_FLAGS).encode()
    folder = cache() / "lab-stand-in" / hashlib.sha256(content).hexdigest()[:16]
    library, where = folder / LIBRARY, folder / "triplet"
    with alone(folder / "lock"):
        if not library.exists():
            where.write_text(run(["gcc", "-print-multiarch"]).strip())
            draft = folder / "draft.so"
            run(["gcc", *_FLAGS, *(str(each) for each in sources if each.suffix == ".c"), "-o", str(draft)])
            draft.rename(library)
    return StandIn(library, str(Path("/usr/lib") / where.read_text() / LIBRARY))
