"""A spec becomes a job: stored, given a pass, and looked after from then on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from gpurun import faults
from gpurun.images.engine import Engine
from gpurun.inventory.model import Inventory
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import refuse_while_damaged
from gpurun.leases.store import LeaseStore
from gpurun.state import audit
from gpurun.state.shared import enter
from gpurun.supervisor.spawn import run_pass_and_start
from gpurun.supervisor.waiter import ensure_waiter


def submit_job(spec: JobSpec, inventory: Inventory, home: Path, environ: Mapping[str, str]) -> JobFolder:
    """Queue a job; it starts now if it fits.

    Raises:
        BadInput: the image is not on this machine: said now, not when GPUs come free.
        StateError: a lease is damaged, so that nothing could be granted.
        UnsafeState: the state directory does not keep its users apart.
    """
    enter(home)
    Engine(inventory.docker_host).image(spec.image)
    refuse_while_damaged(LeaseStore(home).read_all())
    JobStore(home).sweep(now_s=time.time())
    folder = JobStore(home).create(spec, inventory=Path(inventory.source), now_s=time.time())
    audit.note(home, "submit", job=folder.id, name=spec.name, gpus=spec.gpus)
    faults.point()
    run_pass_and_start(home, now_s=time.time(), environ=environ)
    if folder.record().state is State.QUEUED:
        ensure_waiter(home, environ)
    return folder
