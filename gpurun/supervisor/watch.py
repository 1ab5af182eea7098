"""RUNNING: collect what threads see of the gang, let `decide` choose the next step, and carry it out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from gpurun import faults
from gpurun.jobs.limits import is_over_limit
from gpurun.jobs.record import FirstFailure
from gpurun.jobs.states import State
from gpurun.launch.elastic import GLOO_TIMEOUT_S
from gpurun.supervisor.causes import TAIL_LINES
from gpurun.supervisor.checkpoints import CheckpointWatch
from gpurun.supervisor.decide import Ask, Finish, LetGo, Lose, decide, end_from_outside, lost_hosts
from gpurun.supervisor.elastic import Members
from gpurun.supervisor.ends import End, GangEnd
from gpurun.supervisor.engines import stopped_engines
from gpurun.supervisor.gang_seen import GangSeen
from gpurun.supervisor.grows_anew import GrowsAnew
from gpurun.supervisor.hang import HangWatch
from gpurun.supervisor.health import HealthWatch
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import CONNECT_S, Links
from gpurun.supervisor.loglines import last_lines
from gpurun.supervisor.meeting import MeetingWatch
from gpurun.supervisor.outputs_watch import OutputsWatch
from gpurun.supervisor.rehearsal import RehearsalWatch
from gpurun.supervisor.starters import StarterWatch
from gpurun.supervisor.verdicts import (
    after_loss,
    by_launcher,
    explains_alone,
    hosts_at_fault,
    with_cause,
    with_last_words,
)
from gpurun.supervisor.watchers import Watchers

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
        self._health = HealthWatch(job, self._stop)
        self._meeting = MeetingWatch(job, self._stop)
        self._checkpoints = CheckpointWatch(job, self._stop)
        self._members = Members(job, self._stop, on_join=self._follow)
        self._others: tuple[float, bool] | None = None
        self._begun_s, self._cut_off_s = time.monotonic(), -math.inf
        self._down, self._returned_s = frozenset[str](), -math.inf
        self._lost: Mapping[str, FirstFailure] = {}
        self._lost_s = -math.inf
        self._was_late = False
        self._follow(job.members)
        self._checkpoints.thread().start()
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
            ranks=job.log_copy.ranks,
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

    def _hung(self, now_s: float, down_since: Collection[str]) -> str | None:
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
        cause = self._health.first([line.text for line in lines[-TAIL_LINES:]])
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
