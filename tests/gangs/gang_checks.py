"""What must hold of every gang's end, judged from the truth and not from what the supervisor knew."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gang_events import EventfulWorld
from gang_plan import Plan
from gang_ranks import BY_ITSELF, Rank
from gang_world import Host

from gpurun.jobs.record import FirstFailure, State
from gpurun.scheduler.explain import may_lose
from gpurun.supervisor.verdict.decide import FORSAKEN_S, SETTLE_S
from gpurun.supervisor.verdict.ends import TOGETHER_S, End

END_OF_TIME_S = 700.0
DECIDED_WITHIN_S = 60.0
"""After the end of a rank, launcher or host, and after the last disturbance. The sum of what may follow one another: a
host is silent for 13 s, tried again for 6 s and lost at 14 s; an engine has 15 s to come back; a log is waited for for
10 s; hosts are asked for 13 s what they saw."""
WISHED_WITHIN_S = 20.0
"""After a person asked for an end or drained a host, and after the last disturbance."""
LEFT_WITHIN_S = 17.0
"""After an elastic gang's host lost its power, and after the last disturbance: 14 s of silence, and 2.5 s until it is
seen."""
LEFT_AFTER_ADOPTION_S = 13.0
"""The same for a host that was off when the supervisor began: 10 s without any answer."""
RECONNECTED_S = 5.0
"""How long a supervisor may take to reach a host again that is back."""
HEARD_S = 0.7
"""How long the word of a rank's end takes from a host with a good connection to the decision, at most."""


class Stuck(BaseException):
    """A history that would never end."""


class JudgedWorld(EventfulWorld):
    """A world that looks at every decision."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.decided: State | None = None
        self.ended_by: End | None = None
        self.futile = 0
        self.judged_s = 0.0
        self.waits: tuple[float, float] | None = None  # when a retry was decided, and how long it waits

    # -- every step -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """After every step of a supervisor that watches: what has ended is decided in time."""
        if self.now_s - self.began_s > END_OF_TIME_S:
            self.broken("at the end of time the gang still runs, though a person cancelled it")
            raise Stuck
        if self.record.state is not State.RUNNING or self.head_is_cut:
            return
        self._look_at_wishes()
        self._look_at_hosts_that_are_off()
        if not self._is_over():
            return
        within_s = DECIDED_WITHIN_S + (FORSAKEN_S if self.is_elastic and self.launcher_lives else 0.0)
        if self.now_s - max(self.fallen_s, self.disturbed_s) > within_s:
            self.broken(f"nothing was decided for {within_s:g} s after the gang had ended")
            self._give_up()

    def _look_at_wishes(self) -> None:
        """What people ask for is done in time: an end, or a drained host that is to be left."""
        if self.request is None and not self.drained:
            return
        wished_s = [self.wished_s] if self.request is not None else []
        if self._must_leave():
            wished_s.append(self.drained_s)
        since_s = max(min((at_s for at_s in wished_s if at_s is not None), default=self.now_s), self.disturbed_s)
        if self.now_s - max(since_s, self.fallen_s) > WISHED_WITHIN_S:
            self.broken(f"nothing happened for {WISHED_WITHIN_S:g} s after an end was asked for, or a host drained")
            self._give_up()

    def _look_at_hosts_that_are_off(self) -> None:
        """An elastic gang goes on without a host that is off, if it may, and soon."""
        off_s = {name: host.off_s for name, host in self.hosts.items() if host.off_s and not self.is_left(name)}
        if not off_s or not self.launcher_lives or not may_lose(self.lease.members, off_s, self.plan.least):
            return
        was_off = max(off_s.values()) < self.head.began_s
        is_quick = was_off and not any(host.slow_s for host in self.hosts.values())
        within_s = LEFT_AFTER_ADOPTION_S if is_quick else LEFT_WITHIN_S
        if self.now_s - max(*off_s.values(), self.disturbed_s) > within_s:
            self.broken(f"{', '.join(off_s)} was off, and the gang was not told for {within_s:g} s")

    def _must_leave(self) -> bool:
        leaving = [
            name for name in self.drained
            if not self.is_left(name) and not all(rank.code == 0 for rank in self.of(name))
        ]  # fmt: skip
        return bool(leaving) and may_lose(self.lease.members, leaving, self.plan.least)

    def _is_over(self) -> bool:
        """Whether the gang cannot go on, and a supervisor can hear of it."""
        if not self.has_others and not any(host.is_reachable for host in self.hosts.values()):
            return False  # nobody can tell whether the head is cut off
        if not self.launcher_lives:
            return True
        if self.is_elastic:
            mine = [rank for rank in self.ranks if not self.is_left(rank.host)]
            return all(rank.ended_s is not None for rank in mine)  # otherwise its driver judges
        if any(host.box.ended_s is not None for host in self.hosts.values()):
            return True
        ended = [rank.code for rank in self.ranks if rank.ended_s is not None]
        return self.plan.tells and (any(ended) or len(ended) == len(self.ranks))

    # -- an end is decided ----------------------------------------------------------------------------------

    def judge(self, end: End) -> None:
        """An end was decided for the attempt."""
        self.note(f"decided: {end.outcome.value}, code {end.code}: {end.reason or 'no reason'}")
        if self.decided is not None and self.decided is not end.outcome:
            self.broken(f"an end was decided twice: {self.decided.value}, then {end.outcome.value}")
        self.decided, self.ended_by = end.outcome, end
        self._judge_success(end)
        self._judge_reason(end)
        self._judge_going_on(end)
        self._judge_rank(end)
        self._judge_suspects(end)
        self._judge_blame(end)

    def _judge_success(self, end: End) -> None:
        is_done = all(rank.code == 0 and rank.ended_s is not None for rank in self.ranks)
        if end.outcome is State.SUCCEEDED:
            if self.is_elastic:
                if self.launcher_code != 0 and not is_done and not self._have_the_others_returned_0():
                    self.broken("SUCCEEDED, though neither the elastic launcher nor all ranks returned 0")
            elif not is_done and (self.plan.tells or self.first.box.code != 0):  # an engine may say 0 of what it ended
                self.broken("SUCCEEDED, though not every rank returned 0")
        elif is_done and not self.is_elastic and self.plan.tells and self._could_hear():
            self.broken(f"{end.outcome.value}, though every rank had returned 0 before anybody asked for an end")

    def _have_the_others_returned_0(self) -> bool:
        """Whether all ranks of an elastic gang have, but those of hosts that it went on without: enough of them."""
        failed = {rank.host for rank in self.ranks if rank.code}
        rest = [rank for rank in self.ranks if rank.host not in failed]
        return len(rest) >= (self.plan.least or 0) and all(rank.code == 0 and rank.ended_s is not None for rank in rest)

    def _could_hear(self) -> bool:
        """Whether the supervisor heard of all ranks' ends before anybody asked for something else."""
        done_s = max(rank.ended_s or 0.0 for rank in self.ranks) + HEARD_S + 2 * self.most_late_s
        asked_s = self.now_s if self.asked_s is None else self.asked_s
        if not all(host.is_reachable for host in self.hosts.values()):
            return False
        were_quiet = not any(host.wrongs for host in self.hosts.values())
        return were_quiet and self.disturbed_s + RECONNECTED_S < done_s - HEARD_S and done_s < asked_s

    def _judge_reason(self, end: End) -> None:
        """An attempt to which nothing happened is left alone, and the head's own cut is nothing."""
        if end.outcome is State.SUCCEEDED or self._has_reason(end.outcome):
            return
        self.broken(f"{end.outcome.value}, though nothing happened to the gang")

    def _has_reason(self, outcome: State) -> bool:
        if outcome in (State.CANCELLED, State.QUEUED, State.TIMED_OUT):
            return self.asked_s is not None
        return (
            not self.launcher_lives
            or self.has_hung
            or all(rank.ended_s is not None for rank in self.ranks)
            or any(rank.code for rank in self.ranks)
            or any(host.box.ended_s is not None or self._was_lost(host.name) for host in self.hosts.values())
            or any(cause.fatal for host in self.hosts.values() for cause in host.causes)
        )

    def _judge_going_on(self, end: End) -> None:
        """An elastic gang does not end for what it can go on without."""
        if end.outcome is not State.FAILED or end.failure is None or end.failure.kind not in ("container", "host-lost"):
            return
        gone = {name for name, host in self.hosts.items() if host.box.ended_s is not None or self._was_lost(name)}
        gone = {name for name in gone if not self.is_left(name)}
        if self.launcher_lives and gone and may_lose(self.lease.members, gone, self.plan.least):
            self.broken(f"the gang ended, though it could go on without {', '.join(sorted(gone))}")

    def _was_lost(self, name: str) -> bool:
        """Whether a host has been out of the head's reach for long, and not because the head was."""
        host = self.hosts[name]
        return "link" in host.wrongs or "power" in host.wrongs

    def _judge_rank(self, end: End) -> None:
        """A rank that is named failed by itself, and nobody failed clearly before it."""
        named = end.failure
        if end.outcome is not State.FAILED or named is None or named.kind != "rank" or named.rank is None:
            return
        rank = self.ranks[named.rank] if named.rank < len(self.ranks) else None
        if rank is None or self.is_elastic:
            return
        if self._fell_with_its_container(rank):
            self.broken(f"rank {rank.number} was named, which ended with its container ({rank.why})")
        if self._is_muddled():
            return
        if self.plan.launcher == "names another" and all(
            r.code in (0, 137, 143, None) or r.why == "in its wake" for r in self.ranks
        ):
            return  # the launcher's word comes before that of ranks which something broke off
        first, slack_s = self._first_by_itself(), TOGETHER_S + 0.2 + 2 * self.most_late_s
        if not rank.code or rank.why not in BY_ITSELF:
            if not self.most_late_s or first is None or (rank.ended_s or 0.0) > (first.ended_s or 0.0) + slack_s:
                self.broken(f"rank {named.rank} was named, which {rank.why or 'still runs'}")
            return
        assert first is not None
        if rank.ended_s is not None and first.ended_s is not None and rank.ended_s > first.ended_s + slack_s:
            self.broken(
                f"rank {rank.number} was named, rank {first.number} failed {rank.ended_s - first.ended_s:.1f} s before"
            )

    def _fell_with_its_container(self, rank: Rank) -> bool:
        """Whether something else ended the rank's container, and the rank with it. A host's own words tell that.

        A launcher's container that ended with 1 may have ended by itself. A host or an engine may tell too late, and an
        agent that has just begun does not know what a rank went with.
        """
        if not self.plan.tells or not rank.is_cut_off or rank.why not in ("somebody", "power", "engine"):
            return False
        is_launchers = self.has_launcher and rank.host == self.first.name and self.hosts[rank.host].box.code == 1
        is_late = self.most_late_s > SETTLE_S / 2 or (self.retold and self.engine_late_s(rank.host))
        return not is_launchers and not is_late

    def _is_muddled(self) -> bool:
        """Whether more than ranks' own ends is behind this end, or what tells their order did not arrive.

        What a host could not tell, or what counts from when it was asked again (a rank that was killed together with
        its script leaves no time), cannot be put in order. Ranks of an older gpurun are as their launcher says.
        """
        if not self.plan.tells or any(host.wrongs for host in self.hosts.values()):
            return True
        if self.retold and any(rank.is_cut_off for rank in self.ranks):
            return True
        return self.cut_s > self.began_s and self.cut_s > self._first_by_itself_s() - 20.0

    def _first_by_itself_s(self) -> float:
        return min((r.ended_s or 0.0 for r in self.ranks if r.code and r.why in BY_ITSELF), default=self.now_s)

    def _first_by_itself(self) -> Rank | None:
        failed = [rank for rank in self.ranks if rank.code and rank.why in BY_ITSELF]
        was_killed = {rank.number: rank.is_cut_off or rank.code in (137, 143) for rank in failed}
        return min(failed, key=lambda rank: (was_killed[rank.number], rank.ended_s or 0.0), default=None)

    def _judge_suspects(self, end: End) -> None:
        """A host that did nothing wrong is never a suspect.

        A launcher that returned 0 may have been stopped, if something broke a rank off, or took a host away that could
        tell of its ranks. Its host may be suspected: another attempt costs less than to give up a week of training.
        """
        is_unproven = any(rank.code in (137, 143) for rank in self.ranks) or any(
            host.box.why in ("power", "engine") for host in self.hosts.values()
        )
        if self.launcher_code == 0 and is_unproven:
            return
        for name in end.suspects:
            host = self.hosts[name]
            is_wrong = bool(host.wrongs) or self._was_lost(name)
            was_killed = host.box.ended_s is not None and host.box.why not in ("launcher", "fence")
            if not is_wrong and not was_killed:
                self.broken(f"{name} is suspected and did nothing wrong: {end.reason}")

    def _judge_blame(self, end: End) -> None:
        """Ranks that fall in the wake of a host's death, or of its engine's or container's end, are not to blame."""
        if end.outcome is not State.FAILED or end.suspects or self.has_hung or end.failure is None or self.lease.apart:
            return
        began_s, host = min((host.box.ended_s or self.now_s, host.name) for host in self.hosts.values())
        if self.most_late_s > SETTLE_S / 2 or (self.cut_s > self.began_s and self.cut_s > began_s - 20.0):
            return  # its word may have come too late
        if self.retold and self.engine_late_s(host):
            return  # whoever could have seen it before the engine tells is gone
        if all(rank.code == 0 and (rank.ended_s or 0.0) < began_s for rank in self.of(host)):
            return  # its ranks had done their part
        box, is_first = self.hosts[host].box, self.has_launcher and host == self.first.name
        why = "launcher" if is_first and box.code == 1 else box.why  # it cannot be told from its own end
        own_s = min((r.ended_s or 0.0 for r in self.ranks if r.why in BY_ITSELF and r.code), default=self.now_s)
        slack_s = 1.0 if is_first or not self.plan.tells else 0.0
        if why in ("power", "engine", "somebody") and began_s + slack_s < own_s and self.now_s > began_s + 1.0:
            self.broken(f"{host} ended the gang ({why}), and nobody is suspected: {end.reason}")

    def judge_leave(self, failures: Mapping[str, FirstFailure]) -> None:
        """An elastic gang goes on without hosts."""
        for name, failure in failures.items():
            host = self.hosts[name]
            has_failed = any(rank.code for rank in self.of(name)) or host.box.ended_s is not None
            if not has_failed and not host.wrongs and not self._was_lost(name):
                self.broken(f"{name} had to leave and did nothing wrong: {failure.reason}")

    # -- an attempt is over ---------------------------------------------------------------------------------

    def remove_outputs(self, host: Host) -> None:
        """The outputs of a host are removed there."""
        if host.has_outputs and (self.copied_s is None or self.copied_s < self.written_s()):
            self.broken(f"the outputs on {host.name} are removed, and the head does not have them")
        host.has_outputs = False

    def free(self, *, lost: Collection[str]) -> None:
        """The lease is released; the GPUs of lost hosts stay taken."""
        self.lost.update(lost)
        for host in self.hosts.values():
            if host.name in lost:
                self.note(f"{host.name} is lost")
            elif host.box.ended_s is None:
                self.broken(f"the GPUs of {host.name} are free, and the gang's container runs there")
            elif host.is_claimed:
                self.broken(f"the GPUs of {host.name} are free, and the host still has the gang's claim")

    def finish(self) -> None:
        """The fence is through: the record gets the end that was decided."""
        outcome = self.record.outcome
        if outcome is None:
            self.broken("an attempt ended without a decided end")
            outcome = State.FAILED
        if outcome is State.QUEUED and self.request is not None and self.request.kind == "cancel":
            outcome = State.CANCELLED
        says_why_not = any("are still on the host" in text for text in self.said)
        if self.first.has_outputs and self.first.name not in self.lost and not says_why_not:
            self.broken(f"the attempt is over ({outcome.value}), and its outputs are on {self.first.name} only")
        self._judge_retry(outcome)
        self.ends.append((self.record.attempt, outcome))
        self.record = self.record.but(state=outcome, ended_s=self.now_s, outcome=None)
        self.note(f"attempt {self.record.attempt} is over: {outcome.value}")
        self.decided = None

    def checkpoint_written(self) -> str:
        """Half of the attempts write a checkpoint that earlier ones had not."""
        self.judged_s = self.now_s
        return "'model'" if self._has_written else ""

    @property
    def _has_written(self) -> bool:
        return self.chance("checkpoint") < 0.5

    def _judge_retry(self, outcome: State) -> None:
        """Only an end that the job's `retry` names is retried, so often, with progress, and no host's fault counts."""
        end, retry, record = self.ended_by, self.plan.retry, self.record
        before, self.waits = self.waits, None
        if before is not None and self.began_s - before[0] < before[1] - 1.0:
            self.broken(f"a retry began after {self.began_s - before[0]:.1f} s instead of {before[1]:.1f} s")
        if record.unjudged is not None:
            self.broken("an attempt is over, and its retry is not decided")
        restart = record.restart if outcome is State.QUEUED else None
        is_programs = end is not None and not end.suspects and end.outcome in (State.FAILED, State.TIMED_OUT)
        if restart is None or not restart.is_retry:
            if is_programs and self._must_retry(outcome):
                self.broken(f"the job had {record.retries} retries, may have {retry.times}, and is not retried")
            return
        if retry is None or not is_programs or end is None:
            self.broken(f"retried after {end and end.outcome.value} by {end and end.suspects}")
            return
        cause = "time_limit" if end.outcome is State.TIMED_OUT else "hang" if self.has_hung else "failure"
        if cause not in retry.on and not (cause == "hang" and "failure" in retry.on):
            self.broken(f"retried after a {cause}, and the job asks for {retry.on}")
        if not record.retries == restart.attempt <= retry.times:
            self.broken(f"{restart.retry_words}, and the job has had {record.retries}")
        self.futile = 0 if self._has_written else self.futile + 1
        if retry.only_with_progress and (self.futile > 1 or (self.futile and cause == "time_limit")):
            self.broken(f"retried after {self.futile} attempts without progress")
        self.waits = (self.judged_s, restart.wait_s)

    def _must_retry(self, outcome: State) -> bool:
        """Whether nothing speaks against a retry."""
        end, retry = self.ended_by, self.plan.retry
        if retry is None or end is None or end.code == 2 or outcome not in (State.FAILED, State.TIMED_OUT):
            return False
        is_asked = retry.on == ("failure", "hang", "time_limit") and self.record.retries < retry.times
        return is_asked and (self._has_written or not retry.only_with_progress)

    def at_the_end(self) -> None:
        """The job has ended, or waits for a start that it is entitled to."""
        if self.record.restarts > self.plan.max_restarts:
            self.broken(f"restarted {self.record.restarts} times, allowed are {self.plan.max_restarts}")
        if not self.record.state.ended:
            self.broken(f"at the end of time the job is {self.record.state.value}")
