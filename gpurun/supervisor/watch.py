"""RUNNING: follow the launcher's log, watch every host's container, and decide how the attempt ends.

Each host has a watcher thread that waits for its container; the log has one of its own (`LogCopy`). When a host's
connection breaks, its watcher connects again; the gang trains on meanwhile. Only the main loop decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from gpurun import faults
from gpurun.errors import GpurunError, HostFailure
from gpurun.jobs.limits import is_over_limit
from gpurun.jobs.record import FirstFailure
from gpurun.jobs.states import State
from gpurun.launch import output
from gpurun.launch.docker import container_name
from gpurun.launch.elastic import host_of
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.causes import TAIL_LINES, end_of, explained
from gpurun.supervisor.checkpoints import CheckpointWatch
from gpurun.supervisor.elastic import Members
from gpurun.supervisor.ends import End, GangEnd
from gpurun.supervisor.engines import stopped_engines
from gpurun.supervisor.hang import HangWatch
from gpurun.supervisor.health import HealthWatch
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.joblog import last_lines
from gpurun.supervisor.outputs_watch import OutputsWatch

POLL_S = 0.2
RECONNECT_S = 1.0
ENGINE_BACK_S = 15.0
"""How long an engine that is out may take to come back and say how a container ended."""
HOST_LOST_S = 14.0
"""A host that has been silent for this long, while another one is heard, is lost: its gang is ended."""
LOG_SILENT_S = 10.0
"""The launcher has ended: how long its log may be silent before it is judged as it is."""
VERDICT_LINES = 5000
"""How many last lines of the log the launcher's own words are looked for in."""
SIGKILLED = 128 + 9
LAUNCHER_GRACE_S = 20.0
"""How long the launcher may take to notice and explain that a container of its gang has ended."""


@dataclass
class Watched:
    """What the watchers have seen; written by them, read by the main loop. Times on the monotonic clock.

    Attributes:
        down_since: since when a host is out of reach.
        engine_out_s: when a host's Docker was last seen not to answer.
        engine_out_since: since when it has not.
    """

    exits: dict[str, dict[str, Any]] = field(default_factory=dict)
    down_since: dict[str, float] = field(default_factory=dict)
    engine_out_s: dict[str, float] = field(default_factory=dict)
    engine_out_since: dict[str, float] = field(default_factory=dict)
    changed: SimpleQueue[str] = field(default_factory=SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)


def watch(job: SupervisedJob) -> State:
    """Stay until the attempt ends.

    Raises:
        GangEnd: always; with the outcome.
    """
    job.links.open(job.members)
    seen = Watched()
    hang = HangWatch(job)
    health = HealthWatch(job, seen.stop)
    checkpoints = CheckpointWatch(job, seen.stop)
    job.log_copy.start(job.note)

    def follow(hosts: Sequence[str]) -> None:
        exits = [threading.Thread(target=_until_exit, args=(job, host, seen), daemon=True) for host in hosts]
        for thread in [*exits, *health.threads(hosts)]:
            thread.start()

    members = Members(job, seen.stop, on_join=follow)
    follow(job.members)
    checkpoints.thread().start()
    tending = [*members.threads(), *OutputsWatch(job, seen.stop).threads()]
    for thread in tending:
        thread.start()
    try:
        while True:
            faults.point()
            with suppress(Empty):
                seen.changed.get(timeout=POLL_S)
            _shrink(job, seen, health, members)
            _decide(job, seen, health)
            _check_hang(job, hang, seen, health)
            checkpoints.keep()
    finally:
        seen.stop.set()
        for thread in tending:  # from here on nobody else touches hosts or outputs
            thread.join()


def _shrink(job: SupervisedJob, seen: Watched, health: HealthWatch, members: Members) -> None:
    """Go on without hosts that failed, if the gang is elastic and enough are left."""
    if job.spec.min_gpus is None:
        return
    if drained := members.drained():
        members.release(drained)
        health.forget(drained)
    failures = dict(members.without_ranks())
    failures |= {host: _container_failure(host, found) for host, found in seen.exits.copy().items()}
    failures |= {host: _unreachable(host) for host in _lost_hosts(job, seen)}
    if (cause := health.fatal()) and (failure := end_of(cause).failure):
        failures[cause.host] = failure
    if failures and members.can_lose(failures):
        members.lose(failures)
        health.forget(failures)
        for host in failures:
            seen.exits.pop(host, None)
            seen.down_since.pop(host, None)


def _decide(job: SupervisedJob, seen: Watched, health: HealthWatch) -> None:
    """Raise GangEnd if the attempt is over."""
    if job.hosts[0] not in seen.exits and seen.exits:
        end = _wait_for_launcher(job, seen)
        raise GangEnd(_with_cause(job, end, seen, health))
    if launcher := seen.exits.get(job.hosts[0]):
        if "engine_out" not in launcher:  # else nothing more of the log can come
            job.log_copy.wait(LOG_SILENT_S)
        raise GangEnd(_with_cause(job, _verdict(job, seen), seen, health))
    if cause := health.fatal():
        raise GangEnd(end_of(cause))
    job.check_requests(ladder=True)
    if is_over_limit(job.record.started_s, job.spec.time_limit_s, job.clock()):
        limit = f"{job.spec.time_limit_s:g} s"
        raise GangEnd(End(State.TIMED_OUT, f"ran longer than its time limit of {limit}", 1, ladder=True))
    _check_lost(job, seen)


def _with_cause(job: SupervisedJob, end: End, seen: Watched, health: HealthWatch) -> End:
    """The end, with what began it if a host saw that."""
    if end.outcome is not State.FAILED:
        return end
    cause = health.first([logged.line.text for logged in last_lines(job.folder.log, TAIL_LINES)])
    if cause is not None and (cause.blame == "hardware" or cause.kind in ("oom", "disk-full")):
        return explained(end, cause)
    stopped = stopped_engines(job, seen.exits.get(job.hosts[0], {}).get("ended_ago_s"), seen.engine_out_s)
    if not stopped:
        return explained(end, cause)
    end = explained(end, stopped[0])
    return replace(end, suspects=tuple(sorted({*end.suspects, *(each.host for each in stopped)})))


def _check_hang(job: SupervisedJob, hang: HangWatch, seen: Watched, health: HealthWatch) -> None:
    why = None if seen.down_since else hang.hung(time.monotonic() - job.log_copy.last_line_s)
    if why is not None:
        failure = FirstFailure(why, kind="hang")
        end = End(State.FAILED, f"the gang hangs: {why}", 1, failure=failure, ladder=True)
        raise GangEnd(_with_cause(job, end, seen, health))


def _check_lost(job: SupervisedJob, seen: Watched) -> None:
    """End the gang if a host is lost."""
    lost = _lost_hosts(job, seen)
    if not lost:
        return
    reason = f"{', '.join(lost)} cannot be reached any more"
    failure = _unreachable(lost[0])
    raise GangEnd(End(State.FAILED, reason, 4, failure=failure, ladder=True, suspects=tuple(lost)))


def _lost_hosts(job: SupervisedJob, seen: Watched) -> list[str]:
    """Hosts that have been silent for too long; none while no host at all answers: then the head is cut off."""
    now, down = time.monotonic(), seen.down_since.copy()
    lost = sorted(host for host, since in down.items() if now - since > HOST_LOST_S)
    return [] if lost and len(down) == len(job.members) and not _others_answer(job) else lost


def _unreachable(host: str) -> FirstFailure:
    return FirstFailure(reason="the host cannot be reached", host=host, kind="host-lost")


def _others_answer(job: SupervisedJob) -> bool:
    """Whether any host outside the gang can be reached: asked when no host of the gang can."""
    from gpurun.supervisor.links import Links  # noqa: PLC0415 (rarely needed)

    others = [host.name for host in job.inventory.hosts if host.name not in job.hosts][:3]
    if not others:
        return False
    probe = Links(job.inventory, others)
    try:
        return len(probe.open(timeout_s=5.0)) < len(others)
    finally:
        probe.close()


def _wait_for_launcher(job: SupervisedJob, seen: Watched) -> End:
    """A worker's container has ended, and that is the cause; the launcher may take its time to notice."""
    host, found = next(iter(seen.exits.items()))
    deadline = time.monotonic() + LAUNCHER_GRACE_S
    while job.hosts[0] not in seen.exits and time.monotonic() < deadline:
        job.check_requests(ladder=True)
        time.sleep(POLL_S)
    failure = _container_failure(host, found)
    reason = f"{host}: {failure.reason}"
    return End(State.FAILED, reason, 4, exit_code=found.get("code"), failure=failure, ladder=True, suspects=(host,))


def _container_failure(host: str, found: dict[str, Any]) -> FirstFailure:
    reason, kind = _container_end(found), _container_kind(found)
    evidence = found.get("engine_out", "")
    return FirstFailure(reason=reason, host=host, exit_code=found.get("code"), kind=kind, evidence=evidence)


def _container_kind(found: dict[str, Any]) -> str:
    if "engine_out" in found:
        return "engine"
    return "oom" if found.get("oom") else "container"


def _container_end(found: dict[str, Any]) -> str:
    if "engine_out" in found:
        return "its Docker engine has stopped, and the job's container with it"
    if found.get("gone"):
        return "the job's container was removed by somebody else"
    if found.get("oom"):
        return "the job's container ran out of memory and was killed"
    return f"the job's container ended (exit code {found.get('code')})"


def _verdict(job: SupervisedJob, seen: Watched) -> End:
    """How the attempt ended, from the launcher's exit and its own words."""
    found = seen.exits[job.hosts[0]]
    code = found.get("code")
    if code == 0:
        return End(State.SUCCEEDED, "", 0, exit_code=0)
    lines = [logged.line for logged in last_lines(job.folder.log, VERDICT_LINES)]
    rank = output.first_failure(lines)
    # A launcher that SIGKILL ended before it could say why was killed from outside, as one whose container is gone.
    if found.keys() & {"gone", "engine_out"} or found.get("oom") or (rank is None and code == SIGKILLED):
        failure = replace(_container_failure(job.hosts[0], found), excerpt=output.excerpt(lines, None))
        why = f"{job.hosts[0]}: {failure.reason}"
        return End(State.FAILED, why, 4, exit_code=code, failure=failure, suspects=(job.hosts[0],))
    if rank is None:
        return _launcher_failed(job, int(code or 1), output.excerpt(lines, None))
    host = host_of(rank.host) if rank.host is not None else job.plan.place_of(rank.rank or 0)[0]
    who = "a rank" if rank.rank is None else f"rank {rank.rank}"
    why = f"{who} on {host} failed first, with exit code {rank.exit_code}"
    failure = FirstFailure(
        reason=why, rank=rank.rank, host=host, exit_code=rank.exit_code, excerpt=output.excerpt(lines, rank.rank),
        kind="rank",
    )  # fmt: skip
    return End(State.FAILED, why, 1, exit_code=rank.exit_code, failure=failure)


def _launcher_failed(job: SupervisedJob, code: int, excerpt: tuple[str, ...]) -> End:
    said = " ".join(excerpt)
    if code == 127 and "horovodrun" in said and "not found" in said:
        reason = f"the image {job.spec.image} has no horovodrun; see recipes/images"
        return End(
            State.FAILED, reason, 2, exit_code=code, failure=FirstFailure(reason, excerpt=excerpt, kind="launcher")
        )
    reason = f"horovodrun failed with exit code {code}: {excerpt[-1] if excerpt else 'it printed nothing'}"
    failure = FirstFailure(reason, exit_code=code, excerpt=excerpt, kind="launcher")
    return End(State.FAILED, reason, 1, exit_code=code, failure=failure)


def _until_exit(job: SupervisedJob, host: str, seen: Watched) -> None:
    """Wait for the host's container to end, across lost connections and engines that are out."""
    found = None
    while found is None and not _is_over(job, host, seen):
        try:
            found = _container_exit(job, host)
        except RemoteOpFailed as error:
            found = _without_engine(job, host, seen, error)
        except HostFailure as error:
            _lost(job, host, seen, error)
    if found is not None and host in job.members:
        seen.exits[host] = found
    seen.changed.put(host)


def _container_exit(job: SupervisedJob, host: str) -> dict[str, Any]:
    """Wait for the end of the host's container.

    Raises:
        HostFailure: the host or its engine does not answer.
    """
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
        return {"engine_out": error.message, "code": code}  # an engine that is stopped ends its containers first
    mine = next((state for state in states if state["name"] == container), {"gone": True})
    return {**mine, "code": code}


def _is_over(job: SupervisedJob, host: str, seen: Watched) -> bool:
    """Whether a host need not be watched any more."""
    return seen.stop.is_set() or host not in job.members


def _without_engine(job: SupervisedJob, host: str, seen: Watched, error: RemoteOpFailed) -> dict[str, Any] | None:
    """The host answers and its Docker does not: say so once, and give it a moment.

    Returns:
        The end of the container, if it has ended and no engine comes back to say how; with live-restore one does, or
        the container runs on.
    """
    before, now = seen.engine_out_s.get(host), time.monotonic()
    seen.engine_out_s[host] = now
    if before is None or now - before > 5 * RECONNECT_S:
        seen.engine_out_since[host] = now
        if not _is_over(job, host, seen):
            job.events.emit("host", host=host, state="Docker does not answer", reason=error.message)
    seen.stop.wait(RECONNECT_S)
    if now - seen.engine_out_since[host] < ENGINE_BACK_S:
        return None
    with suppress(HostFailure):
        if job.links.agent(host).call("gang.has_ended", job=job.lease.job).value:
            return {"engine_out": error.message, "code": None}
    return None


def _lost(job: SupervisedJob, host: str, seen: Watched, error: GpurunError) -> None:
    """Remember since when the host is out of reach, and try to reach it again."""
    if host not in seen.down_since and not _is_over(job, host, seen):
        seen.down_since[host] = time.monotonic() - job.links.silent_s(host)
        job.events.emit("host", host=host, state="unreachable", reason=error.message)
    while not _is_over(job, host, seen):
        if not job.links.open([host], timeout_s=5.0):
            if seen.down_since.pop(host, None) is not None:
                job.events.emit("host", host=host, state="reachable")
            return
        seen.stop.wait(RECONNECT_S)
