"""The jobs that have not ended, as a pass needs them."""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import JobSpec


@dataclass(frozen=True)
class LiveJob:
    """One job that has not ended.

    Attributes:
        spec: None if it is damaged or missing: then nobody knows where the job may run, and it must not be granted.
        request: what somebody asked of this job.
    """

    record: JobRecord
    spec: JobSpec | None
    request: CancelRequest | None
