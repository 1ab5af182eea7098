"""RUNNING: collect what threads see of the gang, let `decide` choose the next step, and carry it out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from gpurun import faults
from gpurun.errors import OUTLIVED, GpurunError, HostFailure, words_of
from gpurun.head.looks import HostLooks
from gpurun.jobs.record import CancelRequest, FirstFailure, State
from gpurun.jobs.spec import is_over_limit
from gpurun.launch.container import container_name
from gpurun.launch.jobssh import GLOO_TIMEOUT_S
from gpurun.launch.output import Line
from gpurun.leases.allocate import Allocator
from gpurun.quantities import count, duration
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.elastic import Members
from gpurun.supervisor.hang import HangWatch, furthest
from gpurun.supervisor.health import HealthWatch, MeetingWatch, StarterWatch, stopped_engines
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.lines import last_lines
from gpurun.supervisor.links import CONNECT_S, Links
from gpurun.supervisor.outputs.outputs import CheckpointWatch, OutputsWatch
from gpurun.supervisor.slow import SlowWatch
from gpurun.supervisor.verdict.causes import TAIL_LINES, Cause
from gpurun.supervisor.verdict.decide import (
    Ask,
    ContainerEnd,
    Finish,
    GangSeen,
    LetGo,
    Lose,
    after_loss,
    by_launcher,
    decide,
    end_from_outside,
    explains_alone,
    hosts_at_fault,
    lost_hosts,
    with_cause,
    with_last_words,
)
from gpurun.supervisor.verdict.ends import End, GangEnd
from gpurun.supervisor.verdict.hang import Hang

# Watch a running gang's containers: one thread for each host waits for its container's end.


RECONNECT_S = 1.0
ENGINE_BACK_S = 15.0
"""How long an engine that is out may take to come back and say how a container ended."""


class Watchers:
    """What the watchers have seen; they write it, the main loop reads it. Times on the monotonic clock."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._changed: SimpleQueue[str] = SimpleQueue()
        self._exits: dict[str, ContainerEnd] = {}
        self._down_since: dict[str, float] = {}
        self._engine_out_since: dict[str, float] = {}
        self.engine_out_s: dict[str, float] = {}
        """When a host's Docker was last seen not to answer."""

    @property
    def exits(self) -> Mapping[str, ContainerEnd]:
        """Return containers that have ended, by host."""
        return self._exits.copy()

    @property
    def down_since(self) -> Mapping[str, float]:
        """Return unreachable hosts, and since when they were not heard."""
        return self._down_since.copy()

    def watch(self, hosts: Sequence[str]) -> None:
        """Begin to watch hosts."""
        for host in hosts:
            threading.Thread(target=self._until_exit, args=(host,), name=f"exit {host}", daemon=True).start()

    def forget(self, hosts: Collection[str]) -> None:
        """Forget what was seen on hosts that have left, because it does not count if they come back."""
        for host in hosts:
            self._exits.pop(host, None)
            self._down_since.pop(host, None)

    def wait(self, most_s: float) -> None:
        """Wait until a watcher has news."""
        with suppress(Empty):
            self._changed.get(timeout=most_s)

    def _until_exit(self, host: str) -> None:
        """Wait for the host's container to end, even across lost connections and stopped engines."""
        found = None
        while found is None and not self._is_over(host):
            try:
                found = self._container_exit(host)
            except RemoteOpFailed as error:
                found = self._without_engine(host, error)
            except HostFailure as error:
                self._lost(host, error)
            except OUTLIVED:  # the head's own: nobody else would see the container's end
                self._stop.wait(RECONNECT_S)
        if found is not None and host in self._job.members:
            self._exits[host] = found
        self._changed.put(host)

    def _container_exit(self, host: str) -> ContainerEnd:
        """Wait for the end of the host's container.

        Raises:
            HostFailure: the host or its engine does not answer.
        """
        job = self._job
        agent, container = job.links.agent(host), container_name(job.lease.job, job.lease.attempt)
        code = None
        try:
            for reply in agent.stream("docker.wait", container=container):
                code = (reply.value or {}).get("code")
        except RemoteOpFailed as error:
            if error.kind != "not-found":
                raise
        try:
            states = agent.call("gang.inspect", job=job.lease.job).value
        except RemoteOpFailed as error:
            if code is None:
                raise
            # An engine that is stopped ends its containers first.
            return ContainerEnd(time.monotonic(), code, engine_out=error.message)
        mine = next((state for state in states if state["name"] == container), None)
        if mine is None:
            return ContainerEnd(time.monotonic(), code, is_removed=True)
        return ContainerEnd(
            time.monotonic(),
            code,
            is_oom=bool(mine["oom"]),
            ended_ago_s=mine["ended_ago_s"],
            memory_bytes=mine.get("memory_bytes"),
            unwritable=mine.get("unwritable", ""),
        )

    def _is_over(self, host: str) -> bool:
        """Return whether a host need not be watched any more."""
        return self._stop.is_set() or host not in self._job.members

    def _without_engine(self, host: str, error: RemoteOpFailed) -> ContainerEnd | None:
        """Handle a host that answers while its Docker does not: report it once, and wait a moment.

        Returns:
            The end of the container, if it has ended and no engine comes back to say how. With live-restore an engine
            comes back, or the container continues.
        """
        before, now = self.engine_out_s.get(host), time.monotonic()
        self.engine_out_s[host] = now
        if before is None or now - before > 5 * RECONNECT_S:
            self._engine_out_since[host] = now
            if not self._is_over(host):
                self._job.events.emit("host", host=host, state="Docker does not answer", reason=error.message)
        self._stop.wait(RECONNECT_S)
        if now - self._engine_out_since[host] < ENGINE_BACK_S:
            return None
        with suppress(HostFailure):
            if self._job.links.agent(host).call("gang.has_ended", job=self._job.lease.job).value:
                return ContainerEnd(time.monotonic(), engine_out=error.message)
        return None

    def _lost(self, host: str, error: GpurunError) -> None:
        """Remember since when the host is unreachable, and try to reconnect."""
        job = self._job
        if host not in self._down_since and not self._is_over(host):
            self._down_since[host] = time.monotonic() - job.links.silent_s(host)
            job.events.emit("host", host=host, state="unreachable", reason=error.message)
        while not self._is_over(host):
            with suppress(*OUTLIVED):  # the head has no descriptor, or no thread, for a moment
                if not job.links.open([host], connect_s=CONNECT_S):
                    if self._down_since.pop(host, None) is not None:
                        job.events.emit("host", host=host, state="reachable")
                    return
            self._stop.wait(RECONNECT_S)


# Let an elastic gang grow that cannot add hosts while it runs: stop it and start it again with more GPUs.


LOOK_S = 5.0


class GrowsAnew:
    """Looks for more GPUs for a gang that has fewer than it wants. Does nothing for other gangs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop
        self._begun_s = time.monotonic()

    def threads(self) -> list[threading.Thread]:
        """Return the looking thread, not started; none for a gang that has all its GPUs, or can add hosts while it
        runs.
        """
        job = self._job
        if not job.spec.reforms or job.spec.gpus >= job.record.gpus or job.record.rehearsal:
            return []
        job.note(f"the job has {job.spec.gpus} of {job.record.gpus} GPUs, on {', '.join(job.members)}")
        return [threading.Thread(target=self._look, name="growth", daemon=True)]

    def _look(self) -> None:
        told = ""
        while not self._stop.wait(LOOK_S):
            try:
                if self._is_time() and self._ask():
                    return
                told = ""
            except OUTLIVED as error:  # for example a damaged lease: tried again, reported once
                if (why := words_of(error)) != told:
                    self._job.note(f"the job cannot get more GPUs yet: {why}")
                told = why

    def _is_time(self) -> bool:
        """Return whether the gang has run for a while, and would lose little work."""
        record = self._job.record
        return record.has_saved and time.monotonic() - self._begun_s >= patience_s(record.restarts)

    def _ask(self) -> bool:
        job = self._job
        if job.folder.cancel_request() is not None:
            return False
        job.load_inventory_again()
        found = Allocator(job.home).larger(job.lease, job.inventory, now_s=job.clock())
        if found is None:
            HostLooks(job.home).look_while_growing(job.inventory)
            return False
        job.amend(avoid=tuple(host for host in job.record.avoid if host not in found.hosts))
        reason = f"gpurun starts the job again with {count(found.gpus, 'GPU')}, on {', '.join(found.hosts)}"
        job.folder.ask_to_cancel(CancelRequest("preempt", by="its growth", asked_s=job.clock(), reason=reason))
        return True


def patience_s(restarts: int) -> float:
    """Return how long a gang runs before it stops to grow: a minute, doubled with each host's fault, at most an hour.

    So a host that comes back and fails again costs the gang less each time.
    """
    return min(60.0 * 2.0 ** min(max(restarts - 1, 0), 30), 3600.0)


# A rehearsal: one rank runs the command on one GPU before the gang starts, for a while or until it reports a step.


ASK_EVERY_S = 1.0


class RehearsalWatch:
    """Decides whether a rehearsal has been long enough. Does nothing for other attempts."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._asked_s = time.monotonic()

    def passed(self) -> str:
        """Return why it has been long enough; "" if it has not."""
        job = self._job
        if not job.record.rehearsal:
            return ""
        if is_over_limit(job.ran_s, job.spec.rehearse_s):
            return f"one rank ran for {duration(job.spec.rehearse_s or 0)}"
        if time.monotonic() - self._asked_s < ASK_EVERY_S:
            return ""
        self._asked_s = time.monotonic()
        return "" if (step := furthest(job).step) is None else f"one rank reached step {step}"


def judged(end: End, gpus: int) -> End:
    """Return what the end of a rehearsal means for the job: after a success, the whole gang of `gpus` is queued."""
    if end.outcome is State.SUCCEEDED:
        reason = f"the rehearsal passed: {end.reason or 'one rank returned 0'}; the job waits for {gpus} GPUs"
        return replace(end, outcome=State.QUEUED, reason=reason)
    return replace(end, reason=f"in the rehearsal on one GPU: {end.reason}") if end.outcome is State.FAILED else end


POLL_S = 0.2
OTHERS_S = 5.0
"""How long an answer to "does any other host answer" holds."""
LATE_S = 3.0
"""An answer that takes so long comes from a host that was out of reach, or hangs."""
SILENT_S = 6.0
"""A host is heard every 4 s (`gpurun.remote.agent`). If none has been for so long, the head may be cut off."""
VERDICT_LINES = 5000
"""How many last lines of the log the launcher's own words are looked for in."""


def watch(job: SupervisedJob) -> State:
    """Watch until the attempt ends.

    Raises:
        GangEnd: always; with the outcome.
    """
    job.links.open(job.members, connect_s=CONNECT_S)
    watched = _Watch(job)
    try:
        raise GangEnd(watched.until_end())
    finally:
        watched.close()


class _Watch:
    """A running gang with everything that watches it."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._stop = threading.Event()
        self._watchers = Watchers(job, self._stop)
        self._hang = HangWatch(job)
        self._rehearsal = RehearsalWatch(job)
        self._slow = SlowWatch(job, self._stop)
        self._health = HealthWatch(job, self._stop, self._slow)
        self._meeting = MeetingWatch(job, self._stop)
        self._checkpoints = CheckpointWatch(job, self._stop, self._health.heard)
        self._members = Members(job, self._stop, on_join=self._follow)
        self._others: tuple[float, bool] | None = None
        self._begun_s, self._cut_off_s = time.monotonic(), -math.inf
        self._down, self._returned_s = frozenset[str](), -math.inf
        self._lost: Mapping[str, FirstFailure] = {}
        self._lost_s = -math.inf
        self._was_late = False
        self._follow(job.members)
        for thread in (self._checkpoints.thread(), *self._slow.threads()):
            thread.start()
        self._tending = [
            *self._members.threads(), *GrowsAnew(job, self._stop).threads(), *OutputsWatch(job, self._stop).threads(),
            *StarterWatch(job, self._stop).threads(), *self._meeting.threads(),
        ]  # fmt: skip
        for thread in self._tending:
            thread.start()

    def until_end(self) -> End:
        """Carry out the steps of `decide` until the end."""
        while True:
            faults.point()
            self._watchers.wait(POLL_S)
            seen = self._seen()
            match decide(seen):
                case Lose(failures):
                    if at_fault := hosts_at_fault(failures):
                        self._lost, self._lost_s = at_fault, seen.now_s
                    self._members.lose(failures)
                    self._forget(failures)
                case LetGo(hosts):
                    self._members.release(hosts)
                    self._forget(hosts)
                case Ask():
                    self._ask_others()
                case Finish() as finish:
                    if end := self._explained(finish, seen):
                        self._meeting.end(end)
                        return end
            self._checkpoints.keep()

    def close(self) -> None:
        """Stop watching. From here on nothing else touches hosts or outputs."""
        self._stop.set()
        self._health.close()
        for thread in self._tending:
            while thread.is_alive():
                self._members.give_up_joining()
                thread.join(POLL_S)

    def _follow(self, hosts: Sequence[str]) -> None:
        self._job.follow_log(hosts)
        self._watchers.watch(hosts)
        for thread in self._health.threads(hosts):
            thread.start()

    def _forget(self, hosts: Collection[str]) -> None:
        self._health.forget(hosts)
        self._watchers.forget(hosts)
        self._job.log_copy.forget(hosts)

    def _seen(self) -> GangSeen:
        job, now_s = self._job, time.monotonic()
        down_since = self._watchers.down_since
        self._note_silence(now_s, down_since)
        others = self._others if self._others and now_s - self._others[0] < OTHERS_S else None
        is_over = is_over_limit(job.ran_s, job.spec.time_limit_s)
        return GangSeen(
            now_s=now_s,
            members=job.lease.members,
            has_launcher=job.launcher.argv is not None,
            roles=job.spec.roles,
            one_per_host=job.spec.one_per_host,
            least=job.spec.min_gpus,
            heard_since_s=max(self._begun_s, self._cut_off_s),
            cut_off_s=self._cut_off_s,
            drained=job.drains.hosts(job.members) if job.spec.min_gpus is not None else (),
            ranks=job.reports.all,
            exits=self._watchers.exits,
            down_since=down_since,
            returned_s=self._returned_s,
            mute_since=job.links.mute_since,
            others_answer=others[1] if others else None,
            fatal=self._health.fatal(),
            has_launchers_log=job.log_copy.has_launchers_log,
            launcher_line_s=job.log_copy.launcher_line_s,
            request=job.request(),
            limit_s=job.spec.time_limit_s if is_over else None,
            hung=self._hung(now_s, down_since),
            rehearsed=self._rehearsal.passed(),
            idle=self._health.idle_end(),
        )

    def _note_silence(self, now_s: float, down_since: Collection[str]) -> None:
        """Record when no host was heard, and when one was heard again."""
        if self._down.intersection(self._job.members).difference(down_since):
            self._returned_s = now_s
        self._down = frozenset(down_since)
        if len(down_since) < len(self._job.members):
            self._others = None
        silent_s = min((self._job.links.silent_s(host) for host in self._job.members), default=0.0)
        if silent_s > SILENT_S and not (self._others and self._others[1]):
            self._cut_off_s = now_s

    def _hung(self, now_s: float, down_since: Collection[str]) -> Hang | None:
        """Return why the gang counts as hung. Asks no host while one may soon be lost: it would answer late."""
        silent_s = max((self._job.links.silent_s(host) for host in self._job.members), default=0.0)
        if silent_s > SILENT_S and not down_since:
            return None
        return self._hang.hung(now_s - self._job.log_copy.last_line_s, is_heard=not down_since)

    def _ask_others(self) -> None:
        """Find out whether the head itself is cut off."""
        answer = _others_answer(self._job)
        self._others = (time.monotonic(), answer)
        if not answer:
            self._cut_off_s = time.monotonic()

    def _first_cause(self, end: End, lines: Sequence[Line]) -> Cause | None:
        hangs = end.failure is not None and end.failure.kind == "hang"
        return self._health.first(
            [line.text for line in lines[-TAIL_LINES:]], _of_first_rank(end, lines), hangs=hangs
        )  # fmt: skip

    def _explained(self, finish: Finish, seen: GangSeen) -> End | None:
        """Return the end, after asking the log and the hosts about it.

        Returns:
            None if a host cannot be asked and is not lost: the watch continues until it answers or is lost. Also None,
            once, if an answer took long, because hosts may have reported more meanwhile.
        """
        if finish.is_explained:
            return finish.end
        job = self._job
        lines = [logged.line for logged in last_lines(job.folder.log, VERDICT_LINES, attempt=job.lease.attempt)]
        place = [grant.host for grant in job.lease.grants for _ in grant.gpus]
        end = by_launcher(seen, lines, job.spec, place) if finish.by_launcher else finish.end
        if end.outcome is not State.FAILED:
            return end
        end = with_last_words(end, lines, job.spec)
        asked_s, was_late = time.monotonic(), self._was_late
        cause = self._first_cause(end, lines)
        if explains_alone(cause):
            return with_cause(end, cause, ())
        launcher = seen.launcher
        ended_s = launcher.at_s if launcher and launcher.ended_ago_s is not None else None
        stopped = stopped_engines(job, ended_s, self._watchers.engine_out_s)
        self._was_late = time.monotonic() - asked_s > LATE_S
        gone = {each.host for each in stopped if each.kind == "host-lost"}
        if not gone <= {*lost_hosts(seen)} or (self._was_late and not was_late):
            return end_from_outside(seen)
        gloo_s = job.spec.horovod.gloo_timeout_s or GLOO_TIMEOUT_S
        return after_loss(with_cause(end, cause, stopped), self._lost, seen.now_s - self._lost_s, gloo_s)


def _of_first_rank(end: End, lines: Sequence[Line]) -> list[str]:
    """Return the last lines of the rank that failed first; of all ranks, if no rank is known to be the first."""
    rank = None if end.failure is None else end.failure.rank
    return [line.text for line in lines if rank is None or line.rank == rank][-TAIL_LINES:]


def _others_answer(job: SupervisedJob) -> bool:
    """Return whether any host outside the gang can be reached. Called when no host of the gang can."""
    others = [host.name for host in job.inventory.hosts if host.name not in job.members][:3]
    if not others:
        return False
    probe = Links(job.inventory, others)
    try:
        return len(probe.open(timeout_s=5.0)) < len(others)
    finally:
        probe.close()
