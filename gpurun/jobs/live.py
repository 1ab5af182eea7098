"""A job that has not ended, with the fields that a pass needs."""

from __future__ import annotations

import msgspec

from gpurun.jobs.record import CancelRequest, JobRecord
from gpurun.jobs.spec import Wants


class LiveJob(msgspec.Struct, frozen=True, gc=False):
    """One job that has not ended. Not a dataclass, because a pass creates ten thousand of them.

    Attributes:
        wants: None if the job's spec is damaged or missing: then its constraints are unknown, and a pass must not grant
            it.
        request: the cancel or preemption request about this job.
    """

    record: JobRecord
    wants: Wants | None
    request: CancelRequest | None
