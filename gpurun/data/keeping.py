"""Find the data sets that queued and running jobs need. Hosts do not remove these to free space."""

from __future__ import annotations

from pathlib import Path

from gpurun.jobs.store import JobStore


def jobs_by_digest(home: Path) -> dict[str, list[str]]:
    """Return the data sets of jobs that have not ended, each with its jobs."""
    found: dict[str, list[str]] = {}
    for job_id, job in JobStore(home).live_jobs(lambda _: None).items():
        for digest in job.wants.data_digests if job.wants is not None and not job.record.state.ended else ():
            found.setdefault(digest, []).append(job_id)
    return found


def wanted_digests(home: Path) -> frozenset[str]:
    """Return the digests of data sets of jobs that have not ended."""
    return frozenset(jobs_by_digest(home))
