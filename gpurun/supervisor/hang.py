"""Notice that a gang hangs, and find out which rank the others wait for.

A gang hangs if no rank prints a line, reports progress or writes outputs for the recipe's ``hang_timeout``. How busy
its GPUs are says nothing: NCCL's kernels spin while they wait. Collectives that go on, as far as PyTorch or NCCL tell,
are signs of life.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpurun.errors import OUTLIVED
from gpurun.launch.plan import ras_port
from gpurun.quantities import duration
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.ranks import Seating
from gpurun.supervisor.verdict.ends import Reached
from gpurun.supervisor.verdict.hang import Hang, HangSigns, LastCollective, StackFrame, Standing, explain

SILENT_S = 600.0
"""After so long, a person is told where the ranks stand, if they stand still; also without ``hang_timeout``."""
ASK_S = 5.0
ASK_TIMEOUT_S = 8.0
"""The watch waits for these answers, and does nothing else."""
AGAIN_S = 30.0
"""A gang without ``hang_timeout`` is looked at twice: what stands still for so long hangs."""
LOOKS_OF_SILENCE = 20
"""The longer a gang is silent, the rarer are the looks: each interrupts its programs, and its stacks fill a file."""
LOOK_TIMEOUT_S = 12.0
OLD_S = 2.0
"""What was found so long ago is found out again before the gang is ended."""


class HangWatch:
    """Checks repeatedly whether a gang hangs. Asks its hosts only if the log has been silent."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._limit_s = job.spec.hang_timeout_s
        self._notice_s = SILENT_S if self._limit_s is None else self._limit_s / 2
        self._heard_s = self._asked_s = time.monotonic()
        self._quiet_s = 0.0
        self._behind = ""
        self._look = _HangLook(job)
        self._before: HangSigns | None = None
        self._is_told = False

    def hung(self, silent_s: float, *, is_heard: bool = True) -> Hang | None:
        """Return why the gang counts as hung; None if it does not.

        Args:
            silent_s: seconds since its last line.
            is_heard: all its hosts can be reached.
        """
        if not is_heard:
            self._alive()
        silent_s = min(silent_s, time.monotonic() - self._heard_s)
        if silent_s < self._notice_s:
            self._begin_anew()
            return None
        if time.monotonic() - self._asked_s >= min(self._notice_s / 2, ASK_S):
            self._asked_s = time.monotonic()
            self._ask(silent_s)
        if self._quiet_s < self._notice_s:
            self._begin_anew()
            return None
        return self._judged()

    def _alive(self) -> None:
        self._heard_s = time.monotonic()
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._is_told:
            self._job.note("the job does not hang any more: its ranks go on", over="hang")
        self._quiet_s, self._before, self._is_told = 0.0, None, False
        self._look.forget()

    def _ask(self, silent_s: float) -> None:
        """Ask the hosts for other signs of life than lines."""
        job = self._job.lease.job
        said = self._job.links.each(lambda agent: agent.call("gang.progress", job=job, timeout_s=ASK_TIMEOUT_S).value)
        if not _all_answered(said):
            self._alive()
            return
        # A host that answers the one and not the other waits for the outputs' disk, and so may the gang.
        written = self._job.links.each(lambda agent: agent.call("hang.written", job=job, timeout_s=ASK_TIMEOUT_S).value)
        ages = [told["age_s"] for told in (*said.ok.values(), *written.ok.values()) if told["age_s"] is not None]
        self._quiet_s = min([silent_s, *ages])
        self._behind = _furthest_behind(said.ok, self._job.seating)

    def _judged(self) -> Hang | None:
        """Look where the ranks stand, tell it once, and return it when the time is over."""
        is_over = self._limit_s is not None and self._quiet_s >= self._limit_s
        most_s = OLD_S if is_over else max(AGAIN_S, self._quiet_s / LOOKS_OF_SILENCE)
        found = self._look.newest(most_s, gently=not is_over)
        if found is None:
            return None
        before, self._before = self._before, found
        if before is not None and before is not found and _go_on(before.counts, found.counts):
            self._alive()
            return None
        hang = explain(found, self._silence(self._limit_s if is_over and self._limit_s else self._quiet_s))
        stands = before is not None and before is not found and before.standings == found.standings
        if not self._is_told and hang.lines and (self._limit_s is not None or (stands and hang.host is not None)):
            self._is_told = True
            more = {"lines": hang.lines, "evidence": hang.evidence}
            self._job.note(hang.reason, warning=self._job.record.attempt, about="hang", **more)
        return hang if is_over else None

    def _silence(self, quiet_s: float) -> str:
        return f"no rank has printed, reported progress or written outputs for {duration(quiet_s)}{self._behind}"


def _go_on(before: Mapping[Any, tuple[int, int]], now: Mapping[Any, tuple[int, int]]) -> bool:
    """Return whether collectives go on. A rank that is missing in one of two looks only did not answer in time."""
    return any(now[key][0] > before[key][0] or now[key][1] > before[key][1] for key in before.keys() & now.keys())


class _HangLook:
    """Asks the hosts where their ranks stand, in a thread of its own: the answers take seconds."""

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._thread: threading.Thread | None = None
        self._found: HangSigns | None = None
        self._found_s = 0.0
        self._is_gentle = True

    def newest(self, most_s: float, *, gently: bool) -> HangSigns | None:
        """Return what was found in the last `most_s` seconds; if nothing was, None, and look.

        Args:
            gently: leave alone what runs: the gang may be sound.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        is_new = time.monotonic() - self._found_s <= most_s
        if self._found is not None and is_new and (gently or not self._is_gentle):
            return self._found
        self._is_gentle = gently
        self._thread = threading.Thread(target=self._ask, name="hang", daemon=True)
        self._thread.start()
        return None

    def forget(self) -> None:
        """Forget what was found."""
        self._found = None

    def _ask(self) -> None:
        found = HangSigns()
        with suppress(*OUTLIVED):  # the head has no thread, for example: then nothing is known
            found = look(self._job, gently=self._is_gentle)
        self._found_s, self._found = time.monotonic(), found


def look(job: SupervisedJob, *, gently: bool) -> HangSigns:
    """Return where the ranks of a gang stand, as far as its hosts say it.

    Args:
        gently: leave alone processes that run (`gpurun.node.job.hang`).
    """
    lease = job.lease
    port = ras_port(job.spec, lease.grants, lease.ssh_port)
    told = job.links.each(
        lambda agent: (
            agent.call(
                "hang.look", job=lease.job, attempt=lease.attempt, port=port, gently=gently, timeout_s=LOOK_TIMEOUT_S
            ).value
        ),
        job.hosts,
    )
    return replace(seen_of(told.ok, job.seating), silent=tuple(sorted(told.failed)))


def seen_of(told: Mapping[str, Mapping[str, Any]], seating: Seating) -> HangSigns:
    """Return the answers of hosts as one value. A host is believed only about ranks that run there."""
    return HangSigns(
        standings=tuple(each for host, said in told.items() for each in _standings(host, said, seating)),
        collectives=tuple(each for host, said in told.items() for each in _collectives(host, said, seating)),
        ras=next((said["ras"] for said in told.values() if said["ras"]), ""),
        problems=tuple(sorted(_problems(told))),
    )


def _standings(host: str, said: Mapping[str, Any], seating: Seating) -> list[Standing]:
    return [
        Standing(
            host=host,
            rank=one["rank"],
            number=one["rank"] if one["inner"] is None else one["inner"],
            frames=tuple(StackFrame(*frame) for frame in one["frames"]),
            state=one["state"],
        )
        for one in said["stacks"]
        if seating.has(host, one["rank"])
    ]


def _collectives(host: str, said: Mapping[str, Any], seating: Seating) -> list[LastCollective]:
    """Return a host's collectives. If each host has one rank that starts others, their numbers are not known here."""
    return [
        LastCollective(
            host, one["rank"], group["group"], group["entered"], group["done"], group["name"], group["state"]
        )
        for one in said["recorder"]
        if seating.one_per_host or seating.has(host, one["rank"])
        for group in one["groups"]
    ]


def _problems(told: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {
        f"{host} did not read what PyTorch's flight recorder wrote for rank {one['rank']}: {one['problem']}"
        for host, said in told.items()
        for one in said["recorder"]
        if one["problem"]
    }


def _all_answered(said: Results[Any]) -> bool:
    """Return whether every host answered, even if it does not know."""
    return all(isinstance(error, RemoteOpFailed) for error in said.failed.values())


LAST_LOOK_S = 2.0
"""How long the last look at the ranks' reports may take: the attempt has ended, and its GPUs wait."""


def steps_told(job: SupervisedJob, timeout_s: float = 5.0) -> Mapping[str, Mapping[str, Any]]:
    """Return what ranks have reported, by host, of the hosts that answer."""
    hosts = [host for host in job.hosts if job.links.is_open(host)]
    told = job.links.each(
        lambda agent: agent.call("gang.progress", job=job.lease.job, timeout_s=timeout_s).value, hosts
    )
    return told.ok


def furthest(job: SupervisedJob) -> Reached:
    """Return the furthest steps that ranks have reported, on the hosts that answer."""
    told = steps_told(job)
    step, saved = (
        max((step for step, _, _ in _steps(told, job.seating, kind)), default=None)
        for kind in ("progress", "checkpoint")
    )
    return Reached(step, saved)


def _furthest_behind(told: Mapping[str, Any], seating: Seating) -> str:
    """Return which rank stopped first, if ranks reported their steps."""
    steps = _steps(told, seating)
    if not steps:
        return ""
    step, rank, host = min(steps)
    return f"; rank {rank} on {host} is furthest behind, at step {step}"


MOST_STEP = 1 << 62


def _steps(told: Mapping[str, Any], seating: Seating, kind: str = "progress") -> set[tuple[int, int, str]]:
    """Return (step, rank, host) of every rank that reported its step. The user's program writes it, so it may be
    anything; a host may lie, and no file of gpurun takes a longer number.

    Args:
        kind: ``progress``, or ``checkpoint`` for steps that are saved.
    """
    found = set()
    for host, said in told.items():
        for rank, files in seating.own(host, said["ranks"]):
            progress = files.get(kind)
            step = progress.get("step") if isinstance(progress, dict) else None
            if isinstance(step, int) and not isinstance(step, bool) and abs(step) < MOST_STEP:
                found.add((step, rank, host))
    return found
