"""Find where a job comes from: the workdir's Git repository, the versions on this machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import gpurun
from gpurun.jobs.origin import Origin

GIT_TIMEOUT_S = 10.0
MOST_DIFF_BYTES = 1 << 20


def origin_of(workdir: Path | None) -> Origin:
    """Return the origin of a job with this workdir. Ignores a repository that cannot be read."""
    found = Origin(gpurun.__version__, platform.python_version(), platform.node())
    commit = b"" if workdir is None else _git(workdir, "rev-parse", "--verify", "HEAD")
    if workdir is None or not commit.strip():
        return found
    diff = _git(workdir, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".")
    names = _git(workdir, "ls-files", "-z", "--others", "--exclude-standard")
    text = diff.decode("utf-8", "replace") if len(diff) <= MOST_DIFF_BYTES else f"{len(diff)} bytes, not kept\n"
    return Origin(
        found.gpurun, found.python, found.head, commit.decode("ascii", "replace").strip(), text, names.count(b"\0")
    )


def _git(top: Path, *words: str) -> bytes:
    """Return Git's output; nothing if Git fails. Git starts no program that the repository's settings name."""
    argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    try:
        done = subprocess.run(
            argv, cwd=top, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
