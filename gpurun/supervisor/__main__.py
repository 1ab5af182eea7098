"""``python -m gpurun.supervisor JOB LOCK_FD``: the process behind one running job.

Started by `gpurun.supervisor.spawn` with the lease's lock as an open descriptor; not meant to be typed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from gpurun.errors import GpurunError
from gpurun.jobs.states import State
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.life import live
from gpurun.supervisor.spawn import run_pass_and_start
from gpurun.supervisor.waiter import ensure_waiter


def main(argv: list[str]) -> int:
    """Carry one job to the end of its attempt, then let a pass use what came free."""
    job_id, descriptor = argv[0], int(argv[1])
    home = Path(os.environ["GPURUN_HOME"])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leases = LeaseStore(home)
    lease = leases.read(job_id)
    if lease is None:
        print(f"{job_id}: its lease is gone", file=sys.stderr)  # noqa: T201
        return 5
    try:
        job = SupervisedJob(home, lease, LeaseLock(descriptor, leases.path(job_id)))
        state = live(job)
        job.links.close()
        run_pass_and_start(home, now_s=time.time(), environ=os.environ)
        if state is State.QUEUED:
            ensure_waiter(home, os.environ)
    except GpurunError as error:
        print(f"{error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except Exception:  # noqa: BLE001 (a defect: the lease stays, `gpurun recover` takes over)
        traceback.print_exc()
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
