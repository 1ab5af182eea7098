"""Start the processes that outlive a command: supervisors, waiters and conductors; and reap those that have ended.

Each inherits the lock that shows that it lives, so the lock is never free in between. No process ignores SIGCHLD: the
kernel would then discard the exit codes of all its children, also of the commands whose exit codes it needs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpurun.errors import StateUnavailable

UPGRADE_S = 60.0
"""How long a new process waits for an installation of gpurun that replaces its files just then."""
START = """until = {until}
import os, sys, time
try:
    from gpurun.head.loading import load
    main = load(sys.argv[1])
except Exception:
    if time.monotonic() > until: raise
    time.sleep(1)
    os.execv(sys.executable, sys.orig_argv)
sys.exit(main(sys.argv[2:]))
"""
"""What a new process runs: part of the process that starts it, so that it can wait until gpurun's files are there.

The new process may be of another version: the module's name and arguments are kept from version to version.
"""

_started: list[subprocess.Popen[bytes]] | None = None
"""What `_reap` looks at. None in a command, which ends soon."""
_looks = _must_look = False


def live_on() -> None:
    """Prepare a process that outlives its terminal. It ignores hangups and reaps what it starts with `start`."""
    global _started  # noqa: PLW0603 (one per process, as its signal handlers are)
    _started = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap)


def start_detached(
    module: str, *arguments: str, home: Path, environ: Mapping[str, str], lock: int | None = None,
    log: int | None = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a detached process that loads MODULE whole (`gpurun.head.loading`) and calls its `main` with ARGUMENTS.

    Args:
        lock: the descriptor of the lock that it inherits, under the same number.
        log: an open file that takes its output; None = where this process prints.

    Raises:
        StateUnavailable: no process can be started now.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-c" + START.format(until=time.monotonic() + UPGRADE_S), module, *arguments],
            env={**environ, "GPURUN_HOME": str(home)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[] if lock is None else [lock], start_new_session=True, cwd="/",
        )  # fmt: skip
    except OSError as error:
        raise StateUnavailable(
            f"gpurun could not start a process: {error.strerror}", hint="run `gpurun recover` to try again"
        ) from error
    if _started is not None:
        _started.append(process)
        _reap()  # it may have ended before it was in the list
    return process


def _reap(*_: object) -> None:
    """Reap the processes of `start` that have ended, and no others: their callers want the exit codes.

    A signal that comes meanwhile interrupts this function by itself. It then only asks for one more look.
    """
    global _looks, _must_look  # noqa: PLW0603 (as above)
    _must_look = True
    while _must_look and not _looks:
        _looks, _must_look = True, False
        try:
            for process in list(_started or ()):
                if process.poll() is not None and _started is not None:
                    _started.remove(process)
        finally:
            _looks = False
