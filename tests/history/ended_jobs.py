"""Jobs that ran and ended, without any host."""

from __future__ import annotations

from dataclasses import replace

from gpurun.jobs.folder import write_use
from gpurun.jobs.record import FirstFailure, GpuUse, RankUse, Restart, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore, finish

SPEC = JobSpec(name="train", image="me/train:1", gpus=4, command=("true",), pool="vision", project="cats")


def submit(home, *, now_s=100.0, **changes):
    store = JobStore(home)
    return store.create(replace(SPEC, **changes), inventory=home / "inventory.yaml", now_s=now_s)


def running(home):
    """A job whose hosts are fenced: only its end is left to be written."""
    folder = submit(home)
    folder.move(State.GRANTED, attempt=1, granted_s=110.0, granted=(Grant("h1", (0, 1, 2, 3)),))
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state)
    folder.move(State.STOPPING, outcome=State.SUCCEEDED)
    return folder


def run(home, folder, *, at_s, stopped_s, outcome=State.SUCCEEDED, use=None, **changes):
    """An attempt from its grant to its end."""
    gpus = folder.record().gpus
    grants = (Grant("h1", tuple(range(gpus // 2))), Grant("h2", tuple(range(gpus - gpus // 2))))
    attempt = folder.record().attempt + 1
    folder.move(State.GRANTED, granted=grants, granted_s=at_s, attempt=attempt, generation="pascal", gpu_s=0.0,
                gpu_s_until_s=None, reason="", first_failure=None, restart=None)  # fmt: skip
    folder.move(State.PREPARING)
    folder.move(State.STARTING)
    folder.move(State.RUNNING, started_s=at_s + 1)
    if use is not None:
        write_use(folder, attempt, use)
    record = folder.move(State.STOPPING, outcome=outcome, **changes)
    return finish(JobStore(home), record, now_s=stopped_s)


def fail_once(home, folder, *, at_s, stopped_s):
    failure = FirstFailure(reason="h2: GPU 1: Xid 79", rank=3, host="h2", exit_code=137, kind="xid")
    return run(home, folder, at_s=at_s, stopped_s=stopped_s, outcome=State.QUEUED, first_failure=failure,
               restart=Restart(at_s=stopped_s + 10, attempt=2, of=3), reason=failure.reason)  # fmt: skip


def uses(*percents):
    ranks = tuple(RankUse(rank, f"h{1 + rank // 2}", rank % 2, f"GPU-{rank}", 100, float(percent), 99.0, 1000 + rank)
                  for rank, percent in enumerate(percents))  # fmt: skip
    return GpuUse(ranks, tuple((100.0 + step * 30, 50.0) for step in range(100)), told_s=500.0)
