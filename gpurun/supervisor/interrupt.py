"""Interrupt the supervisor's waits when the gang must stop: to prepare a gang may take hours, to stop it must not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpurun.errors import OUTLIVED, GpurunError
from gpurun.jobs.record import CancelRequest
from gpurun.supervisor.ends import GangEnd
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import Links
from gpurun.supervisor.verdicts import asked_end

POLL_S = 0.3


@contextmanager
def giving_way(job: SupervisedJob) -> Iterator[Callable[[], bool]]:
    """Within this context, a cancel or preemption cuts the connections to the gang's hosts, so every wait for a host
    fails.

    Yields:
        A function that returns whether there is such a request, for waits that need no host. The attempt then ends with
            it.

    Raises:
        GangEnd: the requested end, instead of the errors that followed from it.
    """
    job.check_requests(ladder=_may_have_ranks(job))
    ear = _Ear(job, job.links)
    try:
        yield ear.hears
    except (GangEnd, GpurunError):
        if ear.request is None:
            raise
        raise GangEnd(asked_end(ear.request, ladder=_may_have_ranks(job))) from None
    finally:
        ear.close()


def _may_have_ranks(job: SupervisedJob) -> bool:
    return job.record.reached == "containers"


class _Ear:
    """Looks for requests in a thread; `request` is set once connections have been cut for it."""

    def __init__(self, job: SupervisedJob, links: Links) -> None:
        self.request: CancelRequest | None = None
        self._job = job
        self._links = links
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="requests", daemon=True).start()

    def close(self) -> None:
        """Cut nothing from here on. Does not wait for a pass that the thread may be running."""
        with self._lock:
            self._closed.set()

    def hears(self) -> bool:
        """Look for a request once; return whether one was ever found."""
        with suppress(*OUTLIVED):  # the state directory cannot be used: who needs it says so
            if (request := self._job.request()) is not None:
                self._give_way(request)
        return self.request is not None

    def _listen(self) -> None:
        while not self._closed.wait(POLL_S):
            self.hears()

    def _give_way(self, request: CancelRequest) -> None:
        with self._lock:
            if not self._closed.is_set():
                self.request = request
                self._links.cut(self._job.hosts, "the gang must stop")
