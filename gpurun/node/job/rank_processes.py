"""Find the processes of a job's ranks on this host, by the variables that their launcher set."""

import os
import signal as signals
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent.call import Call
from gpurun.node.agent.processes import Process, container_of, environment_of, is_same, list_processes
from gpurun.node.job import job_parts, rank_folders

MARK = "GPURUN_RANK_ID"
"""The script puts it into the environment of the rank, and of nothing else."""
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "GPURUN_RANK")
"""What tells a rank its number: its launcher's word, or gpurun's."""
RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_KEPT = (MARK, "GPURUN_JOB", "GPURUN_ATTEMPT", *RANK_VARIABLES, *RENDEZVOUS)
"""What is kept of an environment; all of it can be a megabyte, in each of a thousand processes."""
SETTLE_S = 2.0
"""How long a notice waits for ranks whose scripts are just starting them."""
POLL_S = 0.05


class RankProcess(NamedTuple):
    """A process with a rank's number: a rank's script, a rank, or a descendant of a rank."""

    process: Process
    rank: int
    environ: Dict[str, str]


class _Main(NamedTuple):
    """A rank's main process, the pid of its script, and whether its launcher has signalled it to end."""

    script: int
    process: Process
    is_told: bool = False


def of_job(job: str, attempt: Optional[int] = None) -> List[RankProcess]:
    """Return every process of the job's ranks, of one attempt or of all."""
    return list(_ranks(_environments(), job, attempt))


def script_of(job: str, name: rank_folders.Name, living: List[Process]) -> Optional[Process]:
    """Return the script that made a rank's folder, if it lives.

    Its start, in ticks since boot, is the same number here and in the container. Its pid differs. Two jobs that start
    together may have scripts with the same numbers: their environments tell them apart. A process in the middle of an
    exec has none: it is about to become a script, and has made no folder.
    """
    for process in living:
        if process.started == name.started and _may_be(process.pid, name.pid):
            environ = environment_of(process.pid)
            if environ is not None and environ.get("GPURUN_JOB", job) == job:
                return process
    return None


def _may_be(pid: int, inner: int) -> bool:
    """Return whether a process has this pid in its own namespace, as far as the kernel says it (not before 4.1)."""
    try:
        with open("/proc/%d/status" % pid, "rb") as stream:
            found = [line.split() for line in stream if line.startswith(b"NSpid:")]
    except OSError:
        return False
    return not found or int(found[0][-1]) == inner


def signal(call: Call, job: str, name: str, attempt: Optional[int] = None) -> int:
    """Send a signal to the ranks here. With ``TERM``, ranks that start later end immediately.

    Args:
        attempt: None asks Docker which attempts have running containers.

    Returns:
        How many ranks got it.

    Raises:
        ValueError: no signal has this name.
        OpError: Docker was asked and does not answer.
    """
    number = _number_of(name)
    told = 0
    for each in _running(call, job) if attempt is None else [int(attempt)]:
        if number == signals.SIGTERM:
            try:
                rank_folders.tell_to_stop(job, each)
            except OSError:
                pass  # a full disk: the ranks that run are told all the same
        told += _tell(call, job, each, number)
    return told


def _running(call: Call, job: str) -> List[int]:
    connection = docker.connect(call)
    try:
        found = job_parts.containers_of(connection, job)
    finally:
        connection.close()
    attempts = {one["Labels"].get("gpurun.attempt", "") for one in found if one["State"] == "running"}
    return sorted(int(attempt) for attempt in attempts if attempt.isascii() and attempt.isdigit())


def _tell(call: Call, job: str, attempt: int, number: int) -> int:
    """Send a signal to every rank's main process, also to those that are just starting; return how many got it.

    Does not signal descendants of a rank: a data loader that ends first would make its rank fail. Does not signal a
    rank again that its launcher has signalled: programs that save at the first SIGTERM end at the second.
    """
    told: Set[Tuple[int, int]] = set()
    ranks: Set[int] = set()
    deadline = time.monotonic() + SETTLE_S
    while True:
        mains, starting = _mains(job, attempt)
        for first, process, is_told in mains:
            key = process.pid, process.started
            if key not in told and is_same(process):
                try:
                    os.kill(process.pid, 0 if is_told and number == signals.SIGTERM else number)
                    told.add(key)
                    ranks.add(first)
                except ProcessLookupError:
                    pass
        if not starting or time.monotonic() >= deadline:
            return len(ranks)
        call.wait(POLL_S)


def _mains(job: str, attempt: int) -> Tuple[List[_Main], bool]:
    """Return the main process of each rank, and whether a script is still starting one.

    If nothing was reported, the script became the rank, and the program may be below a shell. Then returns every
    process with the rank's number.
    """
    everybody = _environments()
    ranks = {one.process.pid: one for one in _ranks(everybody, job, attempt)}
    mains, starting = [], False
    with rank_folders.RankFolders(job, attempt) as folder:
        names = {(name.rank, name.started): name for name in folder.names()}
        for one in ranks.values():
            first = _first(one, ranks)
            name = names.get((first.rank, first.process.started))
            if name is None and MARK not in one.environ:
                mains.append(_Main(first.process.pid, one.process))
            elif name is not None and first is one:
                children = [process for process, environ in everybody if _is_main(one.process, process, environ)]
                is_told = folder.was_told(name.id)
                mains += [_Main(one.process.pid, process, is_told) for process in children]
                seen = folder.see(name.id)
                starting = starting or (not children and (seen is None or seen.code is None))
    return mains, starting


def _first(one: RankProcess, ranks: Dict[int, RankProcess]) -> RankProcess:
    """Return the oldest ancestor with a rank's number: its script, or what the script became."""
    seen: Set[int] = set()
    while one.process.parent in ranks and one.process.pid not in seen:
        seen.add(one.process.pid)
        one = ranks[one.process.parent]
    return one


def _is_main(script: Process, process: Process, environ: Dict[str, str]) -> bool:
    """Return whether a process is the rank, not a tool of its script, which has the script's environment.

    A program may have overwritten its environment, to show another name in ``ps``.
    """
    return process.parent == script.pid and (MARK in environ or "GPURUN_JOB" not in environ)


def _environments() -> List[Tuple[Process, Dict[str, str]]]:
    mine = os.getuid()
    found = ((process, environment_of(process.pid)) for process in list_processes() if process.uid == mine)
    return [
        (process, {name: environ[name] for name in _KEPT if name in environ})
        for process, environ in found
        if environ is not None
    ]


def _ranks(found: List[Tuple[Process, Dict[str, str]]], job: str, attempt: Optional[int]) -> Iterator[RankProcess]:
    """Yield the ranks among processes. A program can have any environment, but in another job's container it is not a
    rank.
    """
    box: Optional[str] = None
    for process, environ in found:
        rank = next((environ[name] for name in RANK_VARIABLES if environ.get(name)), "")
        is_wanted = environ.get("GPURUN_JOB") == job and attempt in (None, _number(environ.get("GPURUN_ATTEMPT", "")))
        if is_wanted and _number(rank) is not None:
            box = job_parts.container_of_main(job) if box is None else box
            if not box or container_of(process.pid) == box:
                yield RankProcess(process, int(rank), environ)


def _number(text: str) -> Optional[int]:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _number_of(name: str) -> int:
    """Return 15 for ``TERM``. Raises ValueError for a name that no signal has."""
    found: Any = getattr(signals, "SIG" + name, None)
    if not isinstance(found, signals.Signals):
        raise ValueError("there is no signal %r" % name)
    return int(found)
