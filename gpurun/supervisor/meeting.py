"""Notice ranks that end with 0 and have never formed a group: they were to train one model, and each trained its own.

Says nothing where it cannot be known: if a rank ended before a look, if a host did not answer, or if another supervisor
has watched the beginning.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from gpurun.errors import OUTLIVED
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.launch.launchers import ALONE, launcher_of
from gpurun.supervisor.ends import End
from gpurun.supervisor.job import SupervisedJob

FIRST_S, OFTEN_S, OFTEN, SELDOM_S = 0.3, 1.0, 15, 5.0
"""When the first look is, how long the next so many wait, and how long all others."""
LATE_S = 10.0
"""The first look at a gang that has run for longer may have missed its group."""
GAP_S = 30.0
"""A kernel remembers a closed connection for a minute; looks that are further apart may have missed one."""
ASK_TIMEOUT_S = 10.0


def is_judged(spec: JobSpec) -> bool:
    """Return whether a job's ranks must form a group: its launcher is for nothing else, and its size does not change.

    Not one process for each host: it starts others, which may not be ranks.
    """
    return (
        spec.gpus > 1 and bool(launcher_of(spec).joins) and not spec.one_per_host and spec.min_gpus is None
        and spec.roles is None
    )  # fmt: skip


class MeetingWatch:
    """Looks at the ranks' connections in a separate thread, until some are found, and once more at the end."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._lock = threading.Lock()
        self._is_open = is_judged(job.spec)
        self._ranks: set[int] = set()
        self._ports: set[int] = set()
        self._looked_s: float | None = None

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job whose ranks need no group."""
        return [threading.Thread(target=self._follow, name="meeting", daemon=True)] if self._is_open else []

    def end(self, end: End) -> None:
        """Say it if a gang that succeeds has formed no group."""
        with suppress(*OUTLIVED):
            if end.outcome is State.SUCCEEDED and self.look() and self._has_seen_all():
                self._job.note(warning(self._job.spec), warning=self._job.record.attempt)

    def look(self) -> bool:
        """Ask the gang's hosts. Return whether it may still be that the ranks have not met."""
        with self._lock:
            if self._is_open:
                self._is_open = False  # unless all goes well
                self._is_open = self._look()
            return self._is_open

    def _look(self) -> bool:
        job, now_s = self._job, time.monotonic()
        first_s = min((rank.started_s for rank in job.log_copy.ranks), default=now_s)
        if now_s - first_s > LATE_S if self._looked_s is None else now_s - self._looked_s > GAP_S:
            return False
        self._looked_s = now_s
        port = job.lease.ssh_port
        has_sshd = job.launcher.argv is not None
        addresses = [job.accounts[host].address for host in job.hosts if host in job.accounts]
        told = job.links.each(
            lambda agent: agent.call(
                "ranks.look", job=job.lease.job, attempt=job.record.attempt, addresses=addresses,
                ports=sorted(self._ports) if has_sshd else [port], spared=[port] if has_sshd else [],
                timeout_s=ASK_TIMEOUT_S,
            ).value,
            job.hosts,
        )  # fmt: skip
        for host, said in told.ok.items():
            self._ranks.update(rank for rank in said["ranks"] if job.seating.has(host, rank))
            self._ports.update(said["ports"])
        is_whole = len(told.ok) == len(addresses) == len(job.hosts)
        return is_whole and not any(said["met"] for said in told.ok.values())

    def _has_seen_all(self) -> bool:
        """Return whether every rank was seen while it ran, and where the gang meets is known."""
        return len(self._ranks) == self._job.spec.gpus and bool(self._ports)

    def _follow(self) -> None:
        looks, wait_s = 0, FIRST_S
        while not self._stop.wait(wait_s):
            with suppress(*OUTLIVED):  # the head has no thread for a moment: then it cannot be known
                if not self.look():
                    return
            looks += 1
            wait_s = OFTEN_S if looks < OFTEN else SELDOM_S


def warning(spec: JobSpec) -> str:
    """Return what a person is told."""
    return (
        f"the {spec.gpus} ranks ended without a connection to each other, so each rank may have trained a model of its "
        f"own. With the launcher {spec.launcher}, a program must call {launcher_of(spec).joins} to connect its ranks. "
        f"Use --launcher {ALONE} for ranks that need no connection"
    )
