"""Find the processes of a job's ranks on this host, by the variables that their launcher set."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import re
import signal as signals
import stat
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent.frames import Call
from gpurun.node.agent.processes import Process, container_of, environment_of, is_same, list_processes
from gpurun.node.job import parts

# Read what the script of each rank leaves in the job's `run` folder (`gpurun.launch.rank` describes it).


MOST_RANKS = 4096
"""So many ranks of one attempt are looked at, the newest: elastic gangs start ranks again and again."""
_MOST_NAMES = 1 << 14
_MOST_FILES = 64
_NUMBER_BYTES = 8
_ID = re.compile(r"(0|[1-9]\d{0,5})\.([1-9]\d{0,9})\.([1-9]\d{0,19})\Z", re.ASCII)
_END = re.compile(r"end\.(0|[1-9]\d{0,2})\Z", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITTEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PUNCH_HOLE = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``: linux/falloc.h."""
STREAMS = ("o", "e", "m")
"""What a rank prints, to stdout and to stderr, and the metrics that it reports."""


class Name(NamedTuple):
    """The name of a rank's folder. `pid` and `started` are those of its script, inside its container."""

    id: str
    rank: int
    pid: int
    started: int


class RankState(NamedTuple):
    """A rank's folder at one moment.

    Attributes:
        begun_s: when the rank started, by this host's clock.
        code: None while no end is recorded.
        ended_s: when the end was recorded; 0 if it is not.
        sizes: bytes of each of `STREAMS`.
    """

    begun_s: float
    code: Optional[int]
    ended_s: float
    sizes: Tuple[int, ...]


def run_folder(job: str) -> str:
    """Return the job's `run` folder on this host."""
    return os.path.join(parts.job_folder(job), "run")


def parse_rank_folder(name: str) -> Optional[Name]:
    """Split a folder's name; None for a name that no script made."""
    found = _ID.match(name)
    return None if found is None else Name(name, *(int(number) for number in found.groups()))


class RankFolders:
    """The open folder with the ranks of one attempt. If it is missing, there are no ranks."""

    def __init__(self, job: str, attempt: int) -> None:
        self._descriptor = _open_below(run_folder(job), "ranks", "%d" % int(attempt))

    def __enter__(self) -> "RankFolders":
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def names(self) -> List[Name]:
        """Return the ranks that have a folder, in the order of their start."""
        if self._descriptor is None:
            return []
        found = (parse_rank_folder(name) for name in _first_names(self._descriptor, _MOST_NAMES))
        ranks = sorted((one for one in found if one is not None), key=lambda one: (one.started, one.pid, one.rank))
        return ranks[-MOST_RANKS:]

    def see(self, name: str) -> Optional[RankState]:
        """Return what a rank has reported; None if it has not started, or its folder is gone."""
        folder = self._open(name)
        if folder is None:
            return None
        try:
            start = _plain(folder, "start")
            if start is None or not start.st_size:
                return None
            code, ended_s = _end(folder)
            # The sizes are read after the end: all that the rank printed is in them.
            found = [_plain(folder, stream) for stream in STREAMS]
            return RankState(start.st_mtime, code, ended_s, tuple(0 if one is None else one.st_size for one in found))
        finally:
            os.close(folder)

    def was_told(self, name: str) -> bool:
        """Return whether the rank's script has passed a signal of the launcher on to it."""
        folder = self._open(name)
        if folder is None:
            return False
        try:
            return _plain(folder, "told") is not None
        finally:
            os.close(folder)

    def number_now(self, name: Name) -> int:
        """Return the rank's number: its first one, unless the rank has reported another since."""
        _, data = self.read(name.id, "now", 0, _NUMBER_BYTES)
        return int(data) if data.isdigit() and len(data) < _NUMBER_BYTES else name.rank

    def read(self, name: str, file: str, offset: int, most: int) -> Tuple[int, bytes]:
        """Return the next bytes of a file from `offset` on, and where they end. Skips a hole in the file."""
        folder = self._open(name)
        if folder is None:
            return offset, b""
        try:
            descriptor = os.open(file, _FILE, dir_fd=folder)
        except OSError:
            return offset, b""
        finally:
            os.close(folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or offset >= status.st_size:
                return offset, b""
            begin = _next_data(descriptor, offset, status.st_size)
            data = os.pread(descriptor, min(most, status.st_size - begin), begin)
            return begin + len(data), data
        except OSError:
            return offset, b""  # the disk's, or the program's own doing: the next look may find it readable
        finally:
            os.close(descriptor)

    def release(self, name: str, file: str, until: int) -> int:
        """Free the disk space of a file before an offset by a hole, so that offsets stay. Returns the freed bytes.

        Does nothing on file systems without holes.
        """
        folder = self._open(name)
        if folder is None:
            return 0
        try:
            descriptor = os.open(file, _WRITTEN, dir_fd=folder)
        except OSError:
            return 0
        finally:
            os.close(folder)
        try:
            status = os.fstat(descriptor)
            length = min(until, status.st_size)
            if length <= 0 or not stat.S_ISREG(status.st_mode) or not _make_hole(descriptor, length):
                return 0
            return max(0, status.st_blocks - os.fstat(descriptor).st_blocks) * 512
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> Optional[int]:
        if self._descriptor is None:
            return None
        try:
            return os.open(name, _FOLDER, dir_fd=self._descriptor)
        except OSError:
            return None


def tell_to_stop(job: str, attempt: int) -> None:
    """Make ranks of this attempt that start from now on end immediately. Idempotent; does not affect other attempts.

    Raises:
        OSError: there is no such job here, or its disk is full.
    """
    folder = os.open(run_folder(job), _FOLDER)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open("stop.%d" % int(attempt), flags, 0o600, dir_fd=folder))
    except FileExistsError:
        pass
    finally:
        os.close(folder)


def age_since_s(moment_s: float) -> float:
    """Return the seconds since a file's time, which a program may have set to anything."""
    return max(0.0, time.time() - moment_s)


def _open_below(path: str, *names: str) -> Optional[int]:
    descriptor = None
    try:
        descriptor = os.open(path, _FOLDER)
        for name in names:
            below = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        return descriptor
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None


def _first_names(descriptor: int, most: int) -> Iterator[str]:
    try:
        with os.scandir(descriptor) as entries:
            yield from [entry.name for entry in itertools.islice(entries, most)]
    except OSError:
        return


def _end(folder: int) -> Tuple[Optional[int], float]:
    """Return the recorded exit code and its time; of several, those of the oldest file."""
    found = []
    for name in _first_names(folder, _MOST_FILES):
        match = _END.match(name)
        status = None if match is None else _plain(folder, name)
        if match is not None and status is not None and int(match.group(1)) < 256:
            found.append((status.st_mtime, int(match.group(1))))
    return (None, 0.0) if not found else (min(found)[1], min(found)[0])


def _plain(folder: int, name: str) -> Optional[os.stat_result]:
    """Return a regular file's status; None for anything else."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _make_hole(descriptor: int, length: int) -> bool:
    """Make a hole from the file's beginning on (man fallocate); return False if that is impossible."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length)) == 0)


def _next_data(descriptor: int, offset: int, size: int) -> int:
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset


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


def script_of(job: str, name: Name, living: List[Process]) -> Optional[Process]:
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
                tell_to_stop(job, each)
            except OSError:
                pass  # a full disk: the ranks that run are told all the same
        told += _tell(call, job, each, number)
    return told


def _running(call: Call, job: str) -> List[int]:
    connection = docker.open_engine(call)
    try:
        found = parts.containers_of(connection, job)
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
    with RankFolders(job, attempt) as folder:
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
            box = parts.container_of_main(job) if box is None else box
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


# Read the ranks' progress reports (`gpurun.runtime`). Their program may have put anything in their place.


_MOST_TOLD = 64
_MOST_TOLD_BYTES = 4 << 20
"""All that ranks of one host tell; a program can leave a million such files."""


class _Report(NamedTuple):
    """A report as this agent last saw it, by its monotonic clock: a host's clock may be set at any moment.

    Attributes:
        version: the time of its file, and a digest of what is in it.
        new_s: since when it counts as a sign of life.
        written_s: when it was written.
    """

    version: Tuple[float, bytes]
    new_s: float
    written_s: float


_reports: Dict[str, Tuple[float, Dict[str, _Report]]] = {}
"""Job → when its reports were last looked at, and file → report."""


def progress(call: Call, job: str) -> Dict[str, Any]:
    """Return what `gpurun.runtime` has left in the job's folder here.

    Returns:
        ``{"age_s", "checkpoint_age_s", "ranks"}``: seconds since the last report on this host and since the last
        reported checkpoint, None if there was none; and by rank its last progress report. A report that this agent sees
        at its first look is a new sign of life: how old it is, only the host's clock would say.
    """
    folder = os.path.join(parts.job_folder(job), "run")
    ages = []
    checkpoints = []
    ranks: Dict[str, Dict[str, Any]] = {}
    left = _MOST_TOLD_BYTES
    now_s = time.monotonic()
    looked_s, before = _reports.get(job, (None, {}))
    seen: Dict[str, _Report] = {}
    for name in sorted(_names_in(folder)):
        path = os.path.join(folder, name)
        kind, _, rank = name.partition(".")
        if kind not in ("progress", "checkpoint") or not (rank.isascii() and rank.isdigit()):
            continue
        try:
            content, changed_s, _ = _read_plain(path)
            left -= len(content)
            if left < 0:
                break
            version = changed_s, hashlib.sha256(content).digest()
            report = before.get(name)
            if report is None or report.version != version:
                age_s = max(0.0, time.time() - changed_s)
                new_s = now_s if looked_s is None else max(now_s - age_s, looked_s)
                report = _Report(version, new_s, now_s - age_s if looked_s is None else new_s)
            seen[name] = report
            ages.append(now_s - report.new_s)
            if kind == "checkpoint":
                checkpoints.append(now_s - report.written_s)
            ranks.setdefault(rank, {})[kind] = _plain_of_rank_progress(json.loads(content))
        except (OSError, ValueError, RecursionError):
            continue  # being replaced, or not the runtime's own
    _reports[job] = now_s, seen
    return {
        "age_s": min(ages) if ages else None,
        "checkpoint_age_s": min(checkpoints) if checkpoints else None,
        "ranks": ranks,
    }


def declared(job: str) -> Optional[List[int]]:
    """Return the last step that a rank here said it has saved (`gpurun.runtime`), and when by this host's clock.

    Returns:
        ``[step, time in ns]``; None if no rank has. The time is 0 if another rank has said another step: it may be
            about to write this one.
    """
    folder = os.path.join(parts.job_folder(job), "run")
    found: List[List[int]] = []
    for name in sorted(_names_in(folder)):
        kind, _, rank = name.partition(".")
        if kind != "checkpoint" or not (rank.isascii() and rank.isdigit()):
            continue
        try:
            content, _, changed_ns = _read_plain(os.path.join(folder, name))
            step = json.loads(content)["step"]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            continue  # being replaced, or not the runtime's own
        if type(step) is int and abs(step) < 1 << 62 and 0 <= changed_ns < 1 << 62:
            found.append([changed_ns, step])
    if not found:
        return None
    changed_ns, step = max(found)
    return [step, changed_ns if all(other == step for _, other in found) else 0]


def _names_in(folder: str) -> List[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except OSError:
        return []


def _plain_of_rank_progress(told: Any) -> Any:
    """Return a program's value if it is short and plain; of an object, those of its values that are."""
    if isinstance(told, dict):
        return {key: value for key, value in list(told.items())[:_MOST_TOLD] if len(key) <= 64 and _is_plain(value)}
    return told if _is_plain(told) else None


def _is_plain(value: Any) -> bool:
    """Return whether every JSON reader accepts it: newer ones refuse numbers of thousands of digits, and JSON has no
    NaN.
    """
    if isinstance(value, str):
        return len(value) <= 1000
    return value is None or (isinstance(value, (int, float)) and abs(value) < 1 << 62)


def _read_plain(path: str) -> Tuple[bytes, float, int]:
    """Return the beginning of a regular file, and when it was written. A rank may have made anything of that name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.read(descriptor, 1 << 16), found.st_mtime, found.st_mtime_ns
    finally:
        os.close(descriptor)
