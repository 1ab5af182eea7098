"""Explain how an attempt ended, from ranks, containers, the launcher and what hosts saw. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpurun.jobs.record import CancelRequest, FirstFailure
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.launch import output
from gpurun.launch.elastic import host_of
from gpurun.launch.launchers import launcher_of
from gpurun.launch.rank import RANK_SCRIPT
from gpurun.supervisor.causes import Cause, explained
from gpurun.supervisor.ends import End
from gpurun.supervisor.exit_codes import code_words
from gpurun.supervisor.gang_seen import NO_TOOLS, ContainerEnd, GangSeen
from gpurun.supervisor.hints import Failed, hint_for, path_hint
from gpurun.supervisor.ranks import Rank, first_failed

SIGKILLED, SIGTERMED = 128 + 9, 128 + 15
NOT_FOUND = 127
"""What a shell exits with that cannot find the program it was to become."""
STOPPED_S = 5.0
"""How long a launcher may outlive the ranks beside it, when something ends them all."""
AFTERMATH_S = 30.0
"""If an elastic gang fails so soon after it lost a host and Gloo's time limit passed, the loss is the cause."""
SUCCEEDED = End(State.SUCCEEDED, "", 0, exit_code=0)


def by_launcher(seen: GangSeen, lines: Sequence[output.Line], spec: JobSpec, place: Sequence[str]) -> End:
    """Return how an attempt ended whose launcher has ended: by its ranks' reports, then by the launcher's.

    Args:
        lines: the last lines of the log.
        spec: names the image, in case it lacks the launcher.
        place: the host of each rank, for a gang whose ranks stay where they are.
    """
    launcher = seen.exits[seen.first]
    failed = first_failed(seen.ranks) if seen.least is None else None
    is_unproven = any(rank.code is None and rank.host not in seen.down_since for rank in seen.ranks)
    has_proof = not is_unproven and (not seen.ranks or any(rank.code == 0 for rank in seen.ranks))
    fell = any(rank.host == seen.first and _fell_with(rank, launcher) for rank in seen.ranks)
    if launcher.code == 0 and not launcher.was_ended and failed is None and has_proof and not fell:
        return SUCCEEDED
    return replace(_failed_by_launcher(seen, failed, lines, spec, place), ladder=is_unproven)


def _fell_with(rank: Rank, launcher: ContainerEnd) -> bool:
    """Return whether what killed a rank may also have ended the launcher. The launcher's exit code 0 then means
    nothing.
    """
    return rank.was_broken_off and rank.ended_s is not None and launcher.at_s - rank.ended_s < STOPPED_S


def _failed_by_launcher(
    seen: GangSeen, failed: Rank | None, lines: Sequence[output.Line], spec: JobSpec, place: Sequence[str]
) -> End:
    launcher, named = seen.exits[seen.first], output.first_failure(lines)
    if failed is not None and not seen.fell_with_others(failed):
        return rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank))
    silent = [host for host in seen.hosts if host in seen.down_since]
    accused = None if named is None else _host_of(named, seen, place)
    if accused in silent or (silent and launcher.code == 0 and not launcher.was_ended):
        return unreachable(silent)
    # A launcher that SIGKILL ended before it could say why was killed from outside, as one whose container is gone.
    if launcher.was_ended or (named is None and launcher.code in (None, 0, SIGKILLED)):
        failure = replace(launcher.failure(seen.first), excerpt=output.excerpt(lines, None))
        why = f"{seen.first}: {failure.reason}"
        return _by_container(seen.first, launcher, End(State.FAILED, why, 4, exit_code=launcher.code, failure=failure))
    if named is not None and not (failed is not None and _was_told_to_end(seen, named.rank)):
        return rank_failed(named.rank, _host_of(named, seen, place), named.exit_code, who=seen.title_of(named.rank))
    if failed is not None:
        return rank_failed(failed.rank, failed.host, failed.code or 1, who=seen.title_of(failed.rank))
    return _launcher_failed(int(launcher.code or 1), output.excerpt(lines, None), spec)


def _host_of(named: output.Failure, seen: GangSeen, place: Sequence[str]) -> str:
    """Return the host of the rank that the launcher names as the first to fail."""
    at = named.rank or 0
    return host_of(named.host) if named.host is not None else place[at] if at < len(place) else seen.first


def _was_told_to_end(seen: GangSeen, number: int | None) -> bool:
    """Return whether a rank reports that it only obeyed SIGTERM, whatever the launcher says."""
    return any(rank.rank == number and rank.code == SIGTERMED for rank in seen.ranks)


def rank_failed(rank: int | None, host: str, code: int, *, who: str, ladder: bool = False) -> End:
    """Return the end after a rank failed first; `rank` None: the launcher names only the host.

    Args:
        who: the rank's name in messages.
    """
    why = f"{who} on {host} failed first, with {code_words(code)}"
    failure = FirstFailure(reason=why, rank=rank, host=host, exit_code=code, kind="rank")
    return End(State.FAILED, why, 1, exit_code=code, failure=failure, ladder=ladder)


def with_last_words(end: End, lines: Sequence[output.Line], spec: JobSpec) -> End:
    """Return the end with the last lines of the rank that failed first, and with what they say to do
    (`gpurun.supervisor.hints`).

    Args:
        lines: the last lines of the attempt.
    """
    failure = end.failure
    if failure is None or failure.excerpt:
        return end
    if failure.kind == "container" and (replaced := path_hint(spec.env)):
        return _because(
            end, end.reason.replace(NO_TOOLS, f"{replaced}, and no folder in this PATH has mkdir and mkfifo")
        )
    if failure.kind != "rank":
        return end
    failure = replace(failure, excerpt=output.excerpt(lines, failure.rank))
    end = replace(end, failure=failure)
    if _lacks_command(failure, spec.command[0]):
        replaced = path_hint(spec.env)
        lacks = f"{replaced}, and no folder in this PATH has" if replaced else f"the image {spec.image} has no"
        return replace(_because(end, f"{lacks} {spec.command[0]}{_instead(spec.command)}: {end.reason}"), code=2)
    printed = [line for line in lines if line.rank == failure.rank]
    hint = hint_for(Failed(failure.exit_code, printed, spec, failure.host or "its host"))
    return _because(end, f"{end.reason}; {hint}") if hint else end


def _instead(command: tuple[str, ...]) -> str:
    """Return what to write for a program that many images lack; "" if gpurun does not know."""
    if command[0] == "python":
        return " (most images have python3, so write python3)"
    line = shlex.quote(shlex.join(command))
    return f" (time is a keyword of bash, so write bash -c {line})" if command[0] == "time" else ""


def _because(end: End, reason: str) -> End:
    return replace(end, reason=reason, failure=None if end.failure is None else replace(end.failure, reason=reason))


def _lacks_command(failure: FirstFailure, command: str) -> bool:
    """Return whether the shell that started the rank reports that the command does not exist, so nothing of it has
    run.
    """
    said = failure.excerpt[-1] if failure.excerpt else ""
    is_shells = said.startswith((f"{RANK_SCRIPT}: ", "sh: ")) and " exec: " in said
    return failure.exit_code == NOT_FOUND and is_shells and said.endswith(f" {command}: not found")


def container_ended(host: str, found: ContainerEnd) -> End:
    """Return the end after the job's container on a host ended."""
    failure = found.failure(host)
    reason = f"{host}: {failure.reason}"
    return _by_container(host, found, End(State.FAILED, reason, 4, exit_code=found.code, failure=failure, ladder=True))


def _by_container(host: str, found: ContainerEnd, end: End) -> End:
    """Return the end with the host as the suspect, unless the job used up the memory of its container."""
    return replace(end, code=1) if found.is_own_memory else replace(end, suspects=(host,))


def unreachable(hosts: Sequence[str]) -> End:
    """Return the end after hosts of the gang were silent for too long; they are the suspects."""
    reason = f"{', '.join(hosts)} cannot be reached any more"
    return End(State.FAILED, reason, 4, failure=host_lost(hosts[0]), ladder=True, suspects=tuple(hosts))


def host_lost(host: str) -> FirstFailure:
    """Return a host's silence as the reason for its ranks' end."""
    return FirstFailure(reason="the host cannot be reached", host=host, kind="host-lost")


def _launcher_failed(code: int, excerpt: tuple[str, ...], spec: JobSpec) -> End:
    said, program = " ".join(excerpt), launcher_of(spec).program
    if code == 127 and program in said and "not found" in said:
        reason = (
            f"the image {spec.image} has no {program}: choose another --launcher, or use an image of recipes/images"
        )
        return End(
            State.FAILED, reason, 2, exit_code=code, failure=FirstFailure(reason, excerpt=excerpt, kind="launcher")
        )
    reason = f"{program} failed with {code_words(code)}: {excerpt[-1] if excerpt else 'it printed nothing'}"
    failure = FirstFailure(reason, exit_code=code, excerpt=excerpt, kind="launcher")
    return End(State.FAILED, reason, 1, exit_code=code, failure=failure)


def with_cause(end: End, cause: Cause | None, stopped: Sequence[Cause]) -> End:
    """Return the end of a failed attempt with its cause, if a host saw it.

    Args:
        cause: the first cause in the reports of hosts' hardware and kernels.
        stopped: engines that were stopped, and hosts that are gone.
    """
    if end.outcome is not State.FAILED:
        return end
    if explains_alone(cause) or not stopped:
        return explained(end, cause)
    end = explained(end, stopped[0])
    return replace(end, suspects=tuple(sorted({*end.suspects, *(each.host for each in stopped)})))


def after_loss(end: End, lost: Mapping[str, FirstFailure], since_s: float, gloo_timeout_s: float) -> End:
    """Return the end of an elastic gang that failed soon after it had lost hosts; the loss is then the first failure.

    Horovod can abort every survivor of a lost host: ``terminate called after throwing … gloo::IoException``, exit code
    134. The last survivor may abort only when Gloo gives up: ``Timed out waiting 60000ms for send``. The program is not
    at fault, and starts again from its checkpoint.

    Args:
        lost: the `hosts_at_fault` that the gang lost last.
        since_s: how long before the end it lost them.
        gloo_timeout_s: how long a rank waits for another one.
    """
    if not lost or end.outcome is not State.FAILED or end.suspects or since_s > gloo_timeout_s + AFTERMATH_S:
        return end
    host = min(lost)
    failure = lost[host]
    reason = f"{host}: {failure.reason}; then {end.reason}"
    return replace(
        end, reason=reason, code=4, exit_code=failure.exit_code, failure=failure, suspects=tuple(sorted(lost))
    )


def hosts_at_fault(failures: Mapping[str, FirstFailure]) -> dict[str, FirstFailure]:
    """Return the lost hosts without those where ranks failed: there the program may be at fault."""
    return {host: failure for host, failure in failures.items() if failure.kind != "rank"}


def explains_alone(cause: Cause | None) -> bool:
    """Return whether a cause explains a failed attempt, whatever happened to the hosts' engines."""
    return cause is not None and (cause.blame == "hardware" or cause.kind in ("oom", "disk-full"))


def asked_end(request: CancelRequest, *, ladder: bool) -> End:
    """Return the requested end."""
    outcome = State.CANCELLED if request.kind == "cancel" else State.QUEUED
    return End(outcome, request.outcome, 1, ladder=ladder)
