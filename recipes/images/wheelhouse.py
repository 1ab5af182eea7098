"""Python packages for an image, downloaded by the machine's own pip so that image builds need no network.

Requirements are pinned with hashes, so a folder of wheels is complete or it does not exist.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What Debian bookworm's interpreter accepts (glibc 2.36, PEP 600), whatever Python runs on the build machine.
PYTHON = "3.11"
_MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux2010", "manylinux1")
WHEELS_ONLY = (
    "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp",
    "--abi", "cp311", "--abi", "abi3", "--abi", "none",
    *(part for tag in _MANYLINUX for part in ("--platform", f"{tag}_x86_64")), "--platform", "any",
)  # fmt: skip
SOURCE_ONLY = ("--no-binary=:all:",)


def digest(*files: Path) -> str:
    """Hash of files' names and contents, in the order given."""
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def fetch(requirements: Path, cache: Path, kind: Sequence[str] = WHEELS_ONLY) -> Path:
    """Return the folder that holds everything in `requirements`, downloaded unless the cache has it.

    Raises:
        subprocess.CalledProcessError: pip could not find a file, or its hash is another; it has said so.
    """
    folder = cache / f"{requirements.stem}-{digest(requirements)}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as scratch:
        target = Path(scratch) / "wheels"
        argv = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--require-hashes"]
        argv += ["--disable-pip-version-check", *kind, "--dest", str(target), "--requirement", str(requirements)]
        subprocess.run(argv, check=True, stdout=sys.stderr)
        target.rename(folder)
    return folder
