"""Run programs of the machine (``ip``, ``tc``, ``ssh-keygen`` …) as argument lists, never as shell text."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from gpurun.lab.errors import LabFailed
from gpurun.lab.requirements import SYSTEM_PATH

_TIMEOUT_S = 60.0
_ENV = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"}


def run(argv: Sequence[str], *, stdin: str = "", merge_stderr: bool = False) -> str:
    """Run a program to its end and return its stdout, with `merge_stderr` also its stderr.

    The program inherits the lab's lock (`gpurun.lab.lock`). If the lab's process is killed, the lock stays held until
    the program has ended too.

    Raises:
        LabFailed: the program failed; the message contains its output.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=_ENV,
            check=False,
            close_fds=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabFailed(
            f"gpurun could not run {argv[0]}: {error}", hint="check that the machine has free memory and PIDs"
        ) from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LabFailed(
            f"`{' '.join(argv)}` failed: {'; '.join(said) or f'exit code {done.returncode}'}",
            hint="`gpurun lab down` removes what a failed command left",
        )
    return done.stdout + done.stderr if merge_stderr else done.stdout
