"""Lost leases: try to fence hosts again until each fence succeeds; then their GPUs are free."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from gpurun.errors import StateError, StateUnavailable
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import JobRecord
from gpurun.jobs.store import JobStore
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.known import lease_hosts
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state.cordons import changing_cordons, cordons_on, lift_cordons
from gpurun.state.identity import state_id
from gpurun.supervisor.ending import with_only_copies
from gpurun.supervisor.fence import fence
from gpurun.supervisor.frozen import cluster_of
from gpurun.supervisor.hooks import epilog_failures
from gpurun.supervisor.last_lines import end_late_output
from gpurun.supervisor.links import Links
from gpurun.supervisor.outputs import bring_late

LOST_RETRY_FIRST_S = 5.0
LOST_RETRY_MOST_S = 60.0


def lose_rest(home: Path, lease: Lease, lock: LeaseLock) -> tuple[Lease, LeaseLock]:
    """Turn the lease of an ended attempt into a lost lease: its hosts are fenced before its GPUs become free.

    gpurun removes an attempt's lease before the attempt ends. So a person or a backup has put this lease back.
    """
    with allocator_lock(home, patience_s=None):
        return LeaseStore(home).abandon(lock, lease, {grant.host for grant in lease.grants})


def keep_asking(home: Path, lease: Lease, lock: LeaseLock) -> None:
    """Hold a lost lease until every one of its hosts has been fenced. Then its GPUs are free.

    If a person uncordons such a host, the job may run there again. The fence leaves that later attempt alone.
    """
    folder = JobStore(home).get(lease.job)
    links = Links(cluster_of(folder, lease)[0], [grant.host for grant in lease.grants])
    events = EventLog(folder.events, clock=time.time)
    proof = f"attempt {lease.attempt} left nothing on the host"
    pending = set(links.targets)
    delay_s = LOST_RETRY_FIRST_S
    try:
        while pending:
            links.open(sorted(pending), timeout_s=10.0)
            answering = {host for host in pending if links.is_open(host)}
            end_late_output(folder, lease, links, pending)
            links.open(sorted(answering), timeout_s=10.0)  # what broke the copy must not keep the proof away
            keep = with_only_copies(None if lease.found else _record(folder), lease, pending)
            said = epilog_failures(events)
            unproven = set(fence(links, lease, pending - keep, state=state_id(home), outputs=True, said=said))
            if keep:
                unproven.update(fence(links, lease, keep, state=state_id(home), outputs=False, said=said))
            fenced = pending - unproven
            for host in sorted(fenced):
                with suppress(FileNotFoundError):  # a person may have removed the job since
                    events.emit("host", host=host, state="fenced", reason=proof)
            pending -= fenced
            if pending:
                time.sleep(delay_s)
                delay_s = min(delay_s * 2, LOST_RETRY_MOST_S)
        found_again(home, lease, links.targets)
        LeaseStore(home).release(lock)
        bring_late(home, lease, links, list(links.targets))
    finally:
        links.close()


def _record(folder: JobFolder) -> JobRecord | None:
    try:
        return folder.record()
    except StateUnavailable:  # it says nothing about the job, whose outputs may be on its hosts alone
        raise
    except StateError:  # a person has removed the job
        return None


def found_again(home: Path, lease: Lease, hosts: Collection[str]) -> None:
    """Uncordon hosts of a lease that were lost and have been fenced."""
    fenced = [each for each in lease_hosts(lease) if each.host in hosts]
    with changing_cordons(home) as cordons:
        found = cordons_on(cordons, fenced)
        for each in fenced:
            if each.host in found and found[each.host].state == "lost":
                lift_cordons(cordons, each)
