"""Which data sets are needed by jobs that have not ended: hosts do not remove them to make room."""

from __future__ import annotations

from pathlib import Path

from gpurun.jobs.store import JobStore


def jobs_by_digest(home: Path) -> dict[str, list[str]]:
    """The data sets of jobs that have not ended, each with the jobs."""
    found: dict[str, list[str]] = {}
    for job_id, job in JobStore(home).live_jobs(lambda _: None).items():
        for digest in job.wants.data_digests if job.wants is not None and not job.record.state.ended else ():
            found.setdefault(digest, []).append(job_id)
    return found


def wanted_digests(home: Path) -> frozenset[str]:
    """The data sets of jobs that have not ended."""
    return frozenset(jobs_by_digest(home))
