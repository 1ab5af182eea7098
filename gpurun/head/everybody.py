"""Root's `gpurun recover` in a shared state directory: recover every user's jobs, as that user."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.jobs.store import JobStore
from gpurun.leases.store import LeaseStore
from gpurun.state.trusted import only_root_s

KEPT = ("PATH", "LANG", "GPURUN_HOME", "DOCKER_HOST")
"""Of root's environment. Where the head's Docker is holds for every user; all else is the user's own."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Recovered:
    """What a recovery did for a user.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: the user's waiter was started.
        problem: what failed; "" if nothing.
    """

    user: str
    adopted: tuple[str, ...] = ()
    waiter: bool = False
    problem: str = ""


def owners(home: Path) -> tuple[int, ...]:
    """Return the users, without root, with jobs that have not ended or that still hold GPUs."""
    found = {record.owner_uid for record in JobStore(home).live_records()}
    found |= {lease.owner_uid for lease in LeaseStore(home).read_all().leases}  # lost ones, too
    return tuple(sorted(found - {0}))


def recover_as(uid: int, home: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> Recovered:
    """Run ``gpurun recover`` as another user, with that user's groups and home."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return Recovered(
            f"uid {uid}",
            problem=f"uid {uid} has no account any more, so gpurun cannot start the processes that supervise its jobs",
        )
    own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "GPURUN_HOME": str(home)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpurun", "recover", "--json", *options],
            check=False, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,  # no terminal of root's, into which it could type
            timeout=TIMEOUT_S,
            env={**{key: environ[key] for key in KEPT if key in environ}, **_python_path(environ), **own}, cwd="/",
            user=uid, group=user.pw_gid, extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Recovered(user.pw_name, problem=f"{user.pw_name}: {error}")
    adopted, waiter = _restarted(done.stdout)
    problem = f"{user.pw_name}: {done.stderr.strip()}" if done.returncode else ""
    return Recovered(user.pw_name, adopted, waiter, problem)


def _restarted(printed: str) -> tuple[tuple[str, ...], bool]:
    """Return the jobs and the waiter that the user's command says it has restarted."""
    try:
        said = json.loads(printed)
        return tuple(map(str, said["adopted"])), said["waiter"] is True
    except (ValueError, TypeError, KeyError, RecursionError):  # it failed before, and its stderr says why
        return (), False


def _python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders of ``PYTHONPATH`` that only root can write. The owner of any other could run code as every
    user.
    """
    kept = only_root_s(environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": kept} if kept else {}
