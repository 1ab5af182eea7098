"""Labs that belong to one test process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from waiting import until

from gpurun.lab import Lab, LabSpec
from gpurun.lab.spec import RUNTIME

_SLOTS = 9
FORGET_JOBS = """
docker ps -aq --filter label=gpurun.job | xargs -r docker rm -f
docker volume ls -q --filter name=gpurun-gpu- | xargs -r docker volume rm
rm -rf /home/*/.gpurun
left=$(docker ps -aq --filter label=gpurun.job) && test -z "$left"
"""


@contextmanager
def own_lab(kind: str, **options) -> Iterator[Lab]:
    """Yield a lab that only this test process uses: xdist workers and other sessions get other labs.

    The names KIND-1, KIND-2 … are taken in turn, so that the hosts' disks, with the images on them, are found
    again by the next session. Jobs are not: a session that was killed may have left some on the disks.
    """
    RUNTIME.mkdir(parents=True, exist_ok=True)
    for slot in range(1, _SLOTS + 1):
        with (RUNTIME / f"pytest-{kind}-{slot}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            lab = Lab(f"{kind}-{slot}")
            lab.down()
            lab.up(LabSpec(lab.name, **options))
            _forget_jobs(lab)
            yield lab
            lab.down()
            return
    raise AssertionError(f"{_SLOTS} test sessions are running on this machine already")


def _forget_jobs(lab: Lab) -> None:
    for host in lab.hosts:
        until(lambda name=host.name: lab.run(name, ["sh", "-c", FORGET_JOBS]).code == 0, every_s=1.0)
