"""An attempt could not start because of its hosts: check these hosts, and place the job elsewhere, or end it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.errors import OUTLIVED, GpurunError, words_of
from gpurun.head.looking import look_at
from gpurun.leases.look import look
from gpurun.state.machines import Out
from gpurun.supervisor import unstarted
from gpurun.supervisor.ends import End
from gpurun.supervisor.job import SupervisedJob

POLL_S = 0.3


def settled(job: SupervisedJob, end: End) -> tuple[End, Mapping[str, Any]]:
    """Return the end of an attempt that could not start, and the changes of the job's record that belong to it."""
    looks = checked(job, sorted(filter(None, end.by_host)))
    found = unstarted.after(
        job.record, end, looks, _able(job, looks), hosts=job.hosts, now_s=job.clock()
    )  # fmt: skip
    return found.end, {"start_failures": found.failures, "placements": found.placements}


def checked(job: SupervisedJob, hosts: Sequence[str]) -> Mapping[str, Out | None]:
    """Check hosts with the check that depends on no job. Returns host → why it is out; None = nothing is wrong with it.

    Returns early, without hosts, if the gang must stop meanwhile, or if the check itself fails.
    """
    found: dict[str, Out | None] = {}

    def work() -> None:
        try:
            found.update(look_at(job.home, job.inventory, hosts))
        except OUTLIVED as error:
            job.note(f"gpurun could not check {', '.join(hosts)}: {words_of(error)}")

    thread = threading.Thread(target=work, name="check", daemon=True)
    thread.start()
    while thread.is_alive() and job.request() is None:
        thread.join(POLL_S)
    looks = dict(found) if not thread.is_alive() else {}
    for host, out in looks.items():
        if out is not None:
            job.events.emit("host", host=host, state="out", reason=out.reason)
    return looks


def _able(job: SupervisedJob, looks: Mapping[str, Out | None]) -> frozenset[str]:
    """Return the hosts that could hold the gang now; none if that cannot be known."""
    try:
        view = look(job.home, now_s=job.clock())
    except GpurunError:
        return frozenset()
    unusable = {*view.unusable(job.inventory), *(host for host, out in looks.items() if out is not None)}
    return unstarted.able_hosts(job.inventory, job.spec, unusable)
