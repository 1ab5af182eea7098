"""The life of one job, as a table of steps that a person can read from top to bottom.

Each step moves the job from one state to the next, and can be repeated after a crash. A step that cannot continue
raises GangEnd, which leads to STOPPING with a decided outcome. If something fails in STOPPING, the outcome stays, and
the supervisor tries again with growing pauses until it succeeds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from gpurun.errors import OUTLIVED, GpurunError, StateError, StateUnavailable
from gpurun.jobs.record import CancelRequest, Restart, Setback, State, Unjudged
from gpurun.leases.allocate import mark_granted
from gpurun.leases.lease import remember
from gpurun.quantities import count, duration
from gpurun.state import durable
from gpurun.supervisor.hang import furthest
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import Links
from gpurun.supervisor.start import prepare, settled, start
from gpurun.supervisor.stop import stop
from gpurun.supervisor.telling import tell
from gpurun.supervisor.verdict import causes, ends
from gpurun.supervisor.verdict.decide import asked_end
from gpurun.supervisor.verdict.ends import End, GangEnd, failed
from gpurun.supervisor.watch import judged, watch

# Interrupt the supervisor's waits when the gang must stop: to prepare a gang may take hours, to stop it must not.


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


RETRY_FIRST_S = 1.0
RETRY_MOST_S = 60.0


def begin(job: SupervisedJob) -> State:
    """QUEUED → GRANTED: the pass wrote the lease, but crashed before it wrote the record."""
    mark_granted(job.store, job.lease)
    job.record = job.folder.record()
    return job.record.state


def take_over(job: SupervisedJob) -> State:
    """GRANTED → PREPARING: this process runs the job from here on."""
    before, retry = job.record.setback, job.spec.retry
    if retry is not None and before is not None and before.is_retried and before.attempt == job.record.attempt - 1:
        job.note(f"retry {job.record.retries} of {retry.times}")
    placed = [{"host": grant.host, "gpus": list(grant.gpus)} for grant in job.lease.grants]
    job.events.emit("placement", generation=job.lease.generation, racks=list(job.lease.racks), hosts=placed)
    return job.move(State.PREPARING)


def _may_be_asked(step: Callable[[SupervisedJob, Callable[[], bool]], State]) -> Callable[[SupervisedJob], State]:
    """Return the step, interrupted by a cancel or preemption."""

    def heeding(job: SupervisedJob) -> State:
        with giving_way(job) as is_asked:
            return step(job, is_asked)

    return heeding


STEPS: Mapping[State, Callable[[SupervisedJob], State]] = {
    State.QUEUED: begin,
    State.GRANTED: take_over,
    State.PREPARING: _may_be_asked(prepare),
    State.STARTING: _may_be_asked(start),
    State.RUNNING: watch,
    State.STOPPING: stop,
}


def live(job: SupervisedJob) -> State:
    """Run a job from its present state to the end of its attempt; return its state then.

    Raises:
        StateUnavailable: the state directory cannot be used now. The gang continues, and this process exits. A later
            command adopts the job.
        GpurunError: the GPUs are released, but the outcome could not be written. A later command writes it.
    """
    durable.sync_folder(job.folder.path)  # who wrote where it is may have been killed before that was safe
    state = job.record.state
    if job.damage is not None and state is not State.STOPPING:
        state = _without_spec(job, job.damage)
    pause_s = RETRY_FIRST_S
    while not state.ended:
        try:
            before, state = state, STEPS[state](job)
            if before is State.STARTING and state is State.RUNNING:
                tell(job, "start")
        except GangEnd as ended:
            state = _stopping(job, ended.end)
        except GpurunError as error:
            if job.record.state is State.STOPPING:
                pause_s = _try_again(job, error, pause_s)
            else:
                state = _stopping(job, failed(error, ladder=True).end)
        if state is State.QUEUED:
            return state
    return state


def _try_again(job: SupervisedJob, error: GpurunError, pause_s: float) -> float:
    """Wait before the next try to carry out the decided end; return how long to wait after that."""
    if isinstance(error, StateUnavailable) or job.gives_back:
        raise error
    job.note(f"gpurun could not end the job and retries in {duration(pause_s)}: {error}")
    time.sleep(pause_s)
    return min(2 * pause_s, RETRY_MOST_S)


def _without_spec(job: SupervisedJob, damage: StateError) -> State:
    """Stop a job with a damaged spec and release its GPUs. A running gang continues until somebody cancels it.

    Raises:
        StateError: the gang runs, and there is no request to stop it.
    """
    if job.record.state is State.QUEUED:
        begin(job)
    try:
        job.check_requests(ladder=True)
    except GangEnd as ended:
        return _stopping(job, ended.end)
    if job.record.state is State.RUNNING:
        damage.hint = f"the job's ranks still run; `gpurun cancel {job.lease.job}` ends the job"
        raise damage
    return _stopping(job, failed(damage).end)


def _stopping(job: SupervisedJob, end: End) -> State:
    """Record the end of an attempt, and what follows. The one place that decides whether the job is placed again."""
    placing: Mapping[str, object] = {}
    if causes.is_unstarted(job.record.state, end):
        end, placing = settled(job, end)
    restart, setback, rehearsal = end.restart, job.record.setback, job.record.rehearsal
    if rehearsal:
        rehearsal = "passed" if end.outcome is State.SUCCEEDED else "due"
        end = judged(end, job.record.gpus)
    again, unjudged = False, None
    if ends.is_worth_another(job.record, end, max_restarts=_most_restarts(job)):
        end, restart, setback = _another(job, end)
        again = restart is not None
    elif not rehearsal:
        end, unjudged = _after_program(job, end)
        setback = _setback(job, end) if unjudged is not None else setback
    return job.move(
        State.STOPPING, stopping_s=job.clock(), outcome=State.QUEUED if again or unjudged else end.outcome,
        reason=end.reason, unjudged=unjudged,
        code=end.code, first_failure=end.failure, ladder=end.ladder,
        restarts=job.record.restarts + again, avoid=job.record.avoiding(end.suspects), restart=restart, setback=setback,
        rehearsal=rehearsal, refusals=remember(job.record.refusals, end.refused, now_s=job.clock()),
        **placing,
    )  # fmt: skip


def _another(job: SupervisedJob, end: End) -> tuple[End, Restart | None, Setback]:
    """Return whether another attempt follows a failed one, and when; none if it failed like the attempt before."""
    record, now_s, before = job.record, job.clock(), job.record.setback
    setback = _setback(job, end)
    if ends.achieved(before, setback, has_saved=record.has_saved):
        setback = replace(setback, fruitless=0, futile=0)
    else:
        setback = replace(setback, fruitless=setback.fruitless + 1)
    why = ""
    if before is not None and ends.repeats(before, setback):
        why = f"attempt {before.attempt} failed the same way, and the job has made no progress since"
    elif job.spec.reforms and setback.fruitless >= ends.MOST_FRUITLESS:
        why = f"hosts failed {setback.fruitless} times in a row, and the job made no progress in between"
    if why:
        return replace(end, reason=f"{end.reason}; {why}"), None, setback
    return end, ends.restart_of(record, max_restarts=_most_restarts(job), now_s=now_s), setback


def _after_program(job: SupervisedJob, end: End) -> tuple[End, Unjudged | None]:
    """Return the retry that may follow an end of the program. `stop` decides it, when the outputs are on the head."""
    cause = ends.programs_end(end, has_run=job.record.state is State.RUNNING)
    if ends.has_used_all(job.record, job.spec.retry, cause):
        used = count(job.record.retries, "retry", "retries")
        end = replace(end, reason=f"{end.reason}; no retry is left: the job had {used}")
    if job.spec.retry is not None and end.outcome is State.FAILED and end.suspects and not job.spec.max_restarts:
        end = replace(end, reason=f"{end.reason}; a host's fault uses no retry, but --max-restarts N allows restarts")
    return end, ends.unjudged_of(job.record, job.spec.retry, end, cause)


def _setback(job: SupervisedJob, end: End) -> Setback:
    reached, record = furthest(job), job.record
    return ends.setback_of(
        ends.failure_of(end), attempt=record.attempt, step=reached.step, saved=reached.saved, ran_s=job.ran_s or 0.0,
        before=record.setback,
    )  # fmt: skip


def _most_restarts(job: SupervisedJob) -> int | None:
    """Return how often the job may restart after hosts' faults: without a limit for a gang that is formed again."""
    return None if job.spec.reforms else job.spec.max_restarts
