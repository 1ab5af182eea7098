"""Notice that each rank of a gang starts a launcher: several processes share each GPU, or several models are trained.

At submit, gpurun reads the command; a launcher in a program that it cannot read shows only while the gang runs.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from gpurun.errors import OUTLIVED, BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers import ALONE
from gpurun.launch.launchers.lines.line import read_line
from gpurun.launch.launchers.lines.table import LAUNCHERS
from gpurun.supervisor.job import SupervisedJob

FIRST_S, LOOKS = 15.0, 8
"""When the first look is, and how many there are: each waits twice as long as the one before, the last 32 minutes."""
ASK_TIMEOUT_S = 10.0
NAMES = [
    *((typed.name, words.split()) for typed in LAUNCHERS for words in typed.programs),
    *((typed.name, ["-m", *words.split()]) for typed in LAUNCHERS for words in typed.modules),
]
"""The launchers' names, and the words that their command lines begin with."""


def is_watched(spec: JobSpec) -> bool:
    """Return whether no rank of a job should start a launcher: a rank has one GPU, and nobody typed the launcher."""
    try:
        line = read_line(spec.command)
    except BadInput:  # of an older gpurun
        return False
    return spec.gpus > 1 and not spec.one_per_host and line.typed is None and line.hidden is None


class StarterWatch:
    """Asks the gang's hosts in a separate thread, until a launcher is found or the ranks have run for long."""

    def __init__(self, job: SupervisedJob, stop: threading.Event) -> None:
        self._job = job
        self._stop = stop

    def threads(self) -> list[threading.Thread]:
        """Return the thread, not started; none for a job whose ranks may start launchers."""
        if not is_watched(self._job.spec):
            return []
        return [threading.Thread(target=self._follow, name="starters", daemon=True)]

    def look(self) -> bool:
        """Ask every host that answers. Return whether the job has been warned."""
        job = self._job
        hosts = [host for host in job.hosts if job.links.is_open(host)]
        told = job.links.each(
            lambda agent: agent.call(
                "ranks.starters", job=job.lease.job, attempt=job.record.attempt, names=[words for _, words in NAMES],
                timeout_s=ASK_TIMEOUT_S,
            ).value,
            hosts,
        )  # fmt: skip
        found = {each["rank"]: each["which"] for answer in told.ok.values() for each in answer}
        if not found:
            return False
        name = NAMES[min(*found.values(), len(NAMES) - 1)][0]
        job.note(warning(len(found), name), warning=job.record.attempt)
        return True

    def _follow(self) -> None:
        for number in range(LOOKS):
            if self._stop.wait(FIRST_S * 2**number):
                return
            with suppress(*OUTLIVED):  # the head has no thread for a moment
                if self.look():
                    return


def warning(ranks: int, name: str) -> str:
    """Return what a person is told."""
    who = f"{ranks} ranks each started" if ranks > 1 else "a rank started"
    return (
        f"{who} {name} itself, although gpurun started one rank for each GPU: the processes of {name} may share GPUs, "
        f"or train several models. --one-per-host runs the command once on each host; --launcher lets gpurun start the "
        f"ranks. If you want {name} in each rank, submit with --launcher {ALONE} and write {name} in the command"
    )
