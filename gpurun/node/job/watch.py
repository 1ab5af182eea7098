"""Report problems of a job's hardware, containers and neighbours on this host while it runs.

Reads the kernel's log, NVML, free disk space, and what the kernel counts of the container
(`gpurun.node.job.watch`). Reports only facts: it sends lines that name a GPU error or a killed process
as they are; the head interprets them (`gpurun.facts`, `gpurun.doctor.findings`).
"""

from __future__ import annotations

import collections
import json
import os
import re
import stat
import threading
import time
import urllib.parse
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.claim_rules import CPUS_LABEL, EVENLY
from gpurun.node.docker import of_jobs
from gpurun.node.folder.below import walk
from gpurun.node.gpus import EVERY_S as EVERY_S_OF_USE
from gpurun.node.gpus import UseTally
from gpurun.node.job import caches, parts, rank_processes
from gpurun.node.nvml_apart import NoAnswer, Nvml
from gpurun.node.probe import facts, probe

# What the kernel counted in the control group of a job's container: memory, and processes that it refused.


UNLIMITED = 1 << 60
"""A limit above this is none: v1 writes the largest number of pages."""
LARGEST_PAGE = 2 << 20
"""v1 does not say whether the limit was reached: ``memory.failcnt`` stays 0 if the limit with swap is the same. But the
last page that fits may be this far below the limit."""
MOST_BYTES, MOST_DIGITS = 1 << 16, 20
COPIES = "cgroup"
"""In a job's ``run`` folder: ``cgroup.ATTEMPT``, the copies that a failed rank's script leaves."""


class Counted(NamedTuple):
    """What was counted since the container began.

    Attributes:
        limit_bytes: the memory that it may use; None = no limit.
        peak_bytes: the most memory that it has used; None = this kernel does not say.
        kills: how many of its processes the kernel has killed because memory ran out, its own or the host's.
        is_own_limit: whether its own limit was reached, so that the host is not at fault.
        refused: how often a new process or thread was refused because there were too many.
        most_processes: how many it may have; None = no limit.
        ooms: how often its own limit was reached; None = this kernel does not say (v1).
    """

    limit_bytes: Optional[int]
    peak_bytes: Optional[int]
    kills: int
    is_own_limit: bool
    refused: int
    most_processes: Optional[int]
    ooms: Optional[int] = None


def counted(pid: int, proc: str = "/proc") -> Optional[Counted]:
    """Return what was counted for the container of a process; None if its control group cannot be read."""
    folders = dict(_folders(pid, proc))
    unified = folders.get("", "")
    return counted_in(folders.get("memory", unified), folders.get("pids", unified))


def counted_in(memory: str, pids: str) -> Optional[Counted]:
    """Return what was counted, from the folders of a control group or of their copies; None if they say nothing."""
    events = _numbers(memory, "memory.events")
    if events:
        limit = _number(memory, "memory.max")
        peak = _number(memory, "memory.peak") or _number(memory, "memory.current")
        is_own_limit = events.get("oom", 0) > 0
    else:
        events = _numbers(memory, "memory.oom_control")
        limit = _number(memory, "memory.limit_in_bytes")
        peak = _number(memory, "memory.max_usage_in_bytes")
        is_own_limit = limit is not None and peak is not None and peak + LARGEST_PAGE > limit
    if "oom_kill" not in events:
        return None
    limit = None if limit is None or limit >= UNLIMITED else limit
    return Counted(
        limit,
        peak,
        events["oom_kill"],
        is_own_limit and limit is not None,
        _numbers(pids, "pids.events").get("max", 0),
        _number(pids, "pids.max"),
        events.get("oom"),
    )


def _folders(pid: int, proc: str) -> Iterator[Tuple[str, str]]:
    """Yield controller → folder of a process's control group; "" is the controller of v2 (cgroups(7))."""
    mounts = _mounts(proc)
    for line in _read("%s/%d/cgroup" % (proc, pid)).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            if name in mounts:
                root, place = mounts[name]
                inside = path[len(root) :] if root != "/" and path.startswith(root) else path
                yield name, place + inside.rstrip("/")


def _mounts(proc: str) -> Dict[str, Tuple[str, str]]:
    """Return controller → (root, mount point) (proc_pid_mountinfo(5))."""
    found: Dict[str, Tuple[str, str]] = {}
    for line in _read(proc + "/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        names = [""] if kind[0] == "cgroup2" else kind[-1].split(",") if kind[0] == "cgroup" else []
        for name in names:
            found.setdefault(name, (fields[3], fields[4]))
    return found


def _numbers(folder: str, name: str) -> Dict[str, int]:
    """Return a file of lines such as ``oom_kill 3``; empty if there is none."""
    found = {}
    for line in _read(os.path.join(folder, name)).splitlines():
        key, _, text = line.partition(" ")
        number = _whole(text)
        if number is not None:
            found[key] = number
    return found


def _number(folder: str, name: str) -> Optional[int]:
    """Return a file of one number; None for ``max``, or if there is none."""
    return _whole(_read(os.path.join(folder, name)).strip())


def _whole(text: str) -> Optional[int]:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _read(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


# Limit the cores of jobs that share this host, and only while they do.


PERIOD_US = 100_000
"""The kernel's own default (``cpu.cfs_period_us``)."""
MOST_LOOKS = 5
"""How often `settle` starts anew because containers have come or gone meanwhile."""
CHECK_EVERY = 15
"""At every look of so many, the quotas are read again: the agent of another job may have written one late."""
MOST_REFUSALS = 3
"""After so many failures in a row, only those looks ask the engine: perhaps it can set no quota at all."""


class Neighbours:
    """Remembers which containers ran at the last look."""

    def __init__(self) -> None:
        self._before: Optional[FrozenSet[str]] = None
        self._looks = self._refusals = 0

    def look(self, call: Call) -> None:
        """Give each container its quota, if containers have come or gone since the last look, or a check is due.

        An engine that does not answer, or that can set no quota, is not this job's failure: the weights remain.
        """
        self._looks += 1
        if self._looks % CHECK_EVERY == 0:
            self._before = None
        elif self._refusals >= MOST_REFUSALS:
            return
        try:
            connection = docker.open_engine(call, timeout_s=20.0)
            try:
                self._before = settle(connection, self._before)
            finally:
                connection.close()
            self._refusals = 0
        except (OpError, OSError, ValueError):
            self._before = None
            self._refusals += 1


def settle(connection: docker.Connection, before: Optional[FrozenSet[str]] = None) -> FrozenSet[str]:
    """Give each running container of gpurun its quota: its share if there are several, none if it is alone.

    Looks again afterwards: if two agents do this while containers come and go, the last of them sees the truth.

    Args:
        before: the containers of an earlier look: if they still are the ones that run, nothing is done.

    Returns:
        The containers that run.

    Raises:
        OpError: Docker does not say, or refused a quota; all others are set.
    """
    for _ in range(MOST_LOOKS):
        found = _running(connection)
        now = frozenset(str(each["Id"]) for each in found)
        if now == before:
            break
        refused: Optional[OpError] = None
        for each in found:
            wanted = _quota_us(each.get("Labels"), len(found))
            if wanted is not None:
                try:
                    _set_quota(connection, str(each["Id"]), wanted if len(found) > 1 else None)
                except OpError as error:
                    refused = error
        if refused is not None:
            raise refused
        before = now
    return now


def _running(connection: docker.Connection) -> List[Dict[str, Any]]:
    filters = urllib.parse.quote(json.dumps({"label": ["gpurun.job"]}))
    status, answer = docker.exchange(connection, "GET", "/containers/json?filters=" + filters)
    found = docker.parse_answer(answer)
    if status != 200 or not isinstance(found, list):
        raise docker.failure(status, answer, "listing the containers of jobs")
    return of_jobs(found, lambda path: docker.exchange(connection, "GET", path))


def _quota_us(labels: Any, running: int) -> Optional[int]:
    """Return the quota in a container's labels, which may contain anything; None if there is none.

    What is divided evenly by those that run is one core at least: less would slow a job down more than it protects
    another.
    """
    text = str(labels.get(CPUS_LABEL) if isinstance(labels, dict) else None)[:12]
    is_even = text.endswith(EVENLY)
    try:
        cpus = float(text[: -len(EVENLY)] if is_even else text)
    except ValueError:
        return None
    if not 0.01 <= cpus <= 100_000:
        return None
    return int((max(1.0, cpus / running) if is_even else cpus) * PERIOD_US)


def _set_quota(connection: docker.Connection, container: str, quota_us: Optional[int]) -> None:
    """Set the quota, or none, if it is another one now. A container that has ended needs none.

    Raises:
        OpError: Docker refused it.
    """
    status, answer = docker.exchange(connection, "GET", "/containers/%s/json" % docker.checked_name(container))
    found = docker.parse_answer(answer) if status == 200 else None
    if not isinstance(found, dict):
        return
    has = found.get("HostConfig", {}).get("CpuQuota") or -1
    wanted = -1 if quota_us is None else quota_us
    if has != wanted:
        body = {"CpuPeriod": PERIOD_US, "CpuQuota": wanted}
        path = "/containers/%s/update" % docker.checked_name(container)
        status, answer = docker.exchange(connection, "POST", path, body)
        if status >= 300 and status != 404:
            raise docker.failure(status, answer, "setting a quota of cores")


# Watch what a job's container takes from its host: memory, processes, and the disk of Docker.


LOW_FREE = 2 << 30
"""Below this, or 5 % of a smaller disk, gpurun looks which container fills it."""
NEIGHBOURS_S = 4.0
"""How often gpurun looks which other jobs run here."""
SIZES_FACTOR = 5.0
"""Docker walks through all that containers have written: it is asked again after so many times its answer took."""
NOTES_S, NOTES_FACTOR = 600.0, 100.0
"""While a disk has room, how often gpurun notes what the job has written, so that it knows later who wrote since; and
the same for a slow Docker."""
LEAST_PART = 8
"""The largest writer fills a disk if it wrote this part of what the disk lost: there may be as many writers as GPUs."""


class ContainerWatch:
    """Remembers what has been reported of the job's container."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._kills = 0
        self._ooms: Optional[int] = 0
        self._is_refused = False
        self._is_ended = False
        self._neighbours = Neighbours()
        self._neighbours_s = 0.0
        self._sizes_s = 0.0
        self._notes_s: Dict[str, float] = {}  # folder of a disk with room → when it is looked at again
        self._before: Dict[str, Tuple[int, int, int]] = {}  # folder of a disk → its free bytes, the job's, its caches'

    def counts(self) -> List[Dict[str, Any]]:
        """Return the news of memory and processes."""
        found: List[Dict[str, Any]] = []
        now = self.counted()
        if now is None:
            return found
        if now.is_own_limit and now.ooms is not None and now.ooms == self._ooms:
            now = now._replace(is_own_limit=False)  # it was reached before, for an earlier kill
        if now.kills > self._kills:
            found.append(dict(memory_of(now), kind="memory", kills=now.kills))
        if now.refused and not self._is_refused:
            found.append({"kind": "pids", "refused": now.refused, "most": now.most_processes})
        if now.kills != self._kills:
            self._kills, self._ooms = now.kills, now.ooms
        self._is_refused = now.refused > 0
        return found

    def counted(self) -> Optional[Counted]:
        """Return what the kernel counted for the container, or had counted when a rank failed; None if not known."""
        folder = parts.job_folder(self._job)
        main = processes.noted(os.path.join(folder, parts.MAIN_FILE))
        now = processes.read_process(main[0]) if main else None
        found = counted(now.pid) if main and now and now.started == main[1] else None
        if found is None:
            copies = os.path.join(folder, "run", "%s.%d" % (COPIES, parts.owner(self._job)))
            found = counted_in(copies, copies)
        return found

    def share_cores(self, call: Call) -> None:
        """See `neighbours.Neighbours`; does nothing if it is not time yet."""
        if time.monotonic() - self._neighbours_s >= NEIGHBOURS_S:
            self._neighbours_s = time.monotonic()
            self._neighbours.look(call)

    def disk(self, call: Call, disks: Iterable[Tuple[str, str]]) -> List[Dict[str, Any]]:
        """Kill the job's container if a disk is nearly full, and it is this job that fills it.

        That is the job that wrote most of what the disk has lost since the last look, whether into its container's own
        file system, its outputs or its folder; or a good part of it, if its container has written the most of all.

        Args:
            disks: name and folder of each disk that the job writes to, Docker's first.
        """
        if self._is_ended or time.monotonic() < self._sizes_s:
            return []
        began_s, seen = time.monotonic(), set()
        for what, path in disks:
            room = _room(path)
            if room is None or room.device in seen:
                continue
            seen.add(room.device)
            is_low = room.free_bytes < room.low_bytes
            if not is_low and time.monotonic() < self._notes_s.get(path, 0.0):
                continue
            filled = self._filler(call, path, room, is_dockers=len(seen) == 1)
            took_s = time.monotonic() - began_s
            if not is_low:
                wait_s = max(NOTES_S, NOTES_FACTOR * took_s) if path in self._before else NEIGHBOURS_S
                self._notes_s[path] = time.monotonic() + wait_s
                continue
            if filled is not None and self._kill(call, filled.container):
                self._is_ended = True
                free, written = room.free_bytes, filled.own_bytes
                return [{"kind": "filled", "what": what, "path": path, "free_bytes": free, "written_bytes": written}]
            self._sizes_s = time.monotonic() + SIZES_FACTOR * took_s
        return []

    def _filler(self, call: Call, path: str, room: "_Room", is_dockers: bool) -> "Optional[_Written]":
        """Return what this job has written on a disk, if it fills the disk."""
        layers = _layers(call)
        mine = [each for each in layers if each.job == self._job]
        if not mine:
            return None
        alone = (mine[0].own_bytes if is_dockers else 0) + self._files_on(room.device)
        shared = self._caches_on(room.device)
        own = mine[0]._replace(own_bytes=alone + shared)
        before, self._before[path] = self._before.get(path), (room.free_bytes, alone, shared)
        if before is None or own.own_bytes < room.low_bytes:
            return None
        is_largest = is_dockers and mine[0].own_bytes >= max(room.low_bytes, *(each.own_bytes for each in layers))
        lost, wrote = before[0] - room.free_bytes, alone - before[1]
        if caches.is_newest_user(self._job):  # of jobs that share them, one at a time is ended for what they grow
            wrote += shared - before[2]
        if is_largest:
            return own if wrote > 0 and LEAST_PART * wrote >= lost else None
        return own if lost > 0 and 2 * wrote > lost else None

    def _files_on(self, device: int) -> int:
        """Return the bytes of the job's outputs and folder, if they are on this device."""
        job = self._job
        own = (parts.outputs_folder(job), parts.kept_layer(job), parts.job_folder(job))
        return sum(_bytes_on(device, folder) for folder in own)

    def _caches_on(self, device: int) -> int:
        """Return the bytes of the caches that the job uses, which other jobs of its user may use, too."""
        folder = caches.folder_of_job(self._job)
        return _bytes_on(device, folder) if folder else 0

    def _kill(self, call: Call, container: str) -> bool:
        try:
            connection = docker.open_engine(call, timeout_s=60.0)
            try:
                status, _ = docker.exchange(connection, "POST", "/containers/%s/kill" % docker.checked_name(container))
            finally:
                connection.close()
        except (OpError, OSError):
            return False
        return status < 300


class _Room(NamedTuple):
    """The room on a disk; below `low_bytes` gpurun looks who fills it."""

    device: int
    free_bytes: int
    low_bytes: int


class _Written(NamedTuple):
    """What a job has written."""

    container: str
    job: str
    own_bytes: int


def _bytes_on(device: int, folder: str) -> int:
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    total = 0
    try:
        if os.fstat(top).st_dev == device:
            total = sum(each.status.st_blocks * 512 for each in walk(top) if each.status is not None)
    except OSError:
        pass
    finally:
        os.close(top)
    return total


def _room(path: str) -> Optional[_Room]:
    try:
        found, device = os.statvfs(path), os.stat(path).st_dev
    except OSError:
        return None
    low = min(LOW_FREE, found.f_blocks * found.f_frsize // 20)
    return _Room(device, found.f_bavail * found.f_frsize, low)


def _layers(call: Call) -> List[_Written]:
    """Return what each running container of gpurun has written into its own file system; empty if Docker does not say
    (``SizeRw`` of its API; absent from an empty one).
    """
    filters = urllib.parse.quote(json.dumps({"label": [parts.LABEL]}))
    try:
        connection = docker.open_engine(call, timeout_s=60.0)
        try:
            status, answer = docker.exchange(connection, "GET", "/containers/json?size=1&filters=" + filters)
            found = docker.parse_answer(answer) if status == 200 else None
            listed = found if isinstance(found, list) else []
            jobs = of_jobs(listed, lambda path: docker.exchange(connection, "GET", path))
        finally:
            connection.close()
    except (OpError, OSError):
        return []
    return [
        _Written(str(each["Id"]), str(each["Labels"].get(parts.LABEL)), int(each.get("SizeRw") or 0)) for each in jobs
    ]


def memory_of(found: Counted) -> Dict[str, Any]:
    """Return what a container had and used, for a report."""
    return {"limit_bytes": found.limit_bytes, "peak_bytes": found.peak_bytes, "is_own_limit": found.is_own_limit}


EVERY_S = 1.0
SLOW_S = 2.0
"""How often disks and the ranks' pids are looked at."""
MOST_LINES = 50
"""Lines of the kernel log passed on at a time: an Xid can come a thousand times a second."""
LONGEST = 600
LEAST_FREE = 256 << 20
"""Below this, or 2 % of a smaller disk, a disk counts as full: the next checkpoint would not fit."""

_WORTH = re.compile(
    r"NVRM: |oom-kill:|Memory cgroup out of memory: |Out of memory: "
    r"|[^:]{1,60}:.{0,80} [Ll]ink (?:is )?[Dd](?:own|OWN)\b|mlx5_core .{1,40}Port module event"
)
_PIDS = re.compile(r"[Pp]rocess (\d+) \(|,pid=(\d+),uid=\d+\s*\Z")

REMEMBERED_S = 60.0
_ranks: Dict[str, Dict[int, Tuple[int, float]]] = {}
"""Job → pid → rank, and when it was last seen: after the kernel has reported a killed process, it can no longer be
asked. Forgotten after `REMEMBERED_S`, because a job may start any number of processes."""


class KernelLog:
    """``/dev/kmsg`` from some time on: one record per read (Documentation/ABI/testing/dev-kmsg).

    Of what the log has at the start, only the stamps tell what is new. They come from a clock that is never corrected:
    after months of uptime it is a minute off. So what arrives later counts whatever its stamp. Thread-safe.

    If this user may not read it (``dmesg_restrict``), there are no lines. In the lab a regular file replaces it; lines
    without a record's prefix are skipped.
    """

    def __init__(self, age_s: float, path: str = "") -> None:
        self._lock = threading.Lock()
        self._told: "collections.deque[Dict[str, Any]]" = collections.deque(maxlen=10 * MOST_LINES)
        self._looked_s = time.monotonic()
        self._rest = b""
        try:
            path = path or (os.environ.get("GPURUN_DEV") or "/dev") + "/kmsg"
            self._fd: Optional[int] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
        except OSError:
            self._fd = None
        self._old = [item for item in self._arrived() if item["age_s"] <= age_s]

    def lines(self) -> List[Dict[str, Any]]:
        """Return ``{"line", "age_s"}`` of the kernel's own relevant lines since the last call, at most `MOST_LINES`."""
        with self._lock:
            old, self._old = self._old, []
            now_s = time.monotonic()
            most_s, self._looked_s = now_s - self._looked_s, now_s
            new = [{**item, "age_s": min(item["age_s"], most_s)} for item in self._arrived()]
            found = (old + new)[:MOST_LINES]
            self._told += [{**item, "at_s": now_s - item["age_s"]} for item in found]
            return found

    def all(self) -> List[Dict[str, Any]]:
        """Return the last lines, those of earlier calls of `lines` too."""
        self.lines()
        with self._lock:
            return [{"line": item["line"], "age_s": time.monotonic() - item["at_s"]} for item in self._told]

    def _arrived(self) -> Iterator[Dict[str, Any]]:
        for record in self._records():
            item = self._item(record)
            if item is not None:
                yield item

    def _records(self) -> Iterator[bytes]:
        while self._fd is not None:
            try:
                data = os.read(self._fd, 1 << 16 if self._is_file else 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                return
            if not data:
                return
            if not self._is_file:
                yield data
                continue
            *records, self._rest = (self._rest + data).split(b"\n")
            yield from records

    def _item(self, record: bytes) -> Optional[Dict[str, Any]]:
        prefix, semicolon, text = record.partition(b";")
        fields = prefix.split(b",")
        try:
            level, stamp_s = int(fields[0]), int(fields[2]) / 1e6
        except (IndexError, ValueError):
            return None
        line = text.split(b"\n")[0].decode("utf-8", "replace")[:LONGEST]
        # Facility 0 is the kernel; programs that write to the log get another one.
        if not semicolon or level >> 3 or not _WORTH.match(line):
            return None
        return {"line": line, "age_s": max(0.0, time.monotonic() - stamp_s)}

    def close(self) -> None:
        """Close it."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


_logs: Dict[str, KernelLog] = {}
"""Job → the log that its watch follows."""


def watch(
    call: Call, job: str, gpus: List[int], age_s: float, use_every_s: float = EVERY_S_OF_USE
) -> Iterator[List[Dict[str, Any]]]:
    """Yield problems as they happen, until cancelled. The first item may be empty: the watch has started.

    Args:
        gpus: the job's GPUs here.
        age_s: how long the attempt has run: older lines that the kernel's log has at the start are ignored.
        use_every_s: how often the use of the GPUs is reported.

    Yields:
        lists of ``{"kind": "kernel", "line", "age_s", "rank", "cards": GPU → PCI address}``,
        ``{"kind": "xid", "gpu", "xid"}``, ``{"kind": "lost", "gpu", "text"}``,
        ``{"kind": "ecc", "gpu", "count", "before"}``, ``{"kind": "disk", "what", "path", "free_bytes"}``,
        ``{"kind": "memory", "limit_bytes", "peak_bytes", "kills", "is_own_limit"}``, ``{"kind": "pids", "most"}``,
        ``{"kind": "link", "device", "state"}``: a port of an RDMA device was active, and is not any more,
        ``{"kind": "filled", "what", "path", "free_bytes", "written_bytes"}``: the container filled a disk and was
        killed, ``{"kind": "nvml", "text"}``, and the items of `UseTally`.
    """
    log = _logs[job] = KernelLog(age_s)
    nvml: Optional[Nvml] = Nvml() if gpus else None
    cards = parts.cards_of_gpus(job, gpus)
    seen, use = _Seen(parts.known_cards(job), ContainerWatch(job)), UseTally(cards, every_s=use_every_s)
    try:
        yield []
        while True:
            seen.container.share_cores(call)
            found = seen.slowly(job) + seen.filled(job, call) + seen.container.counts()
            found += [_named(item, job, seen) for item in log.lines()]
            if found:
                yield found
            if nvml is None:
                call.wait(EVERY_S)
                continue
            try:
                said = nvml.ask(cards, wait_ms=int(EVERY_S * 1000))
                found = seen.gpus(said) + use.add(said)
            except NoAnswer as error:
                found = [{"kind": "nvml", "text": str(error)}]
                nvml.close()
                nvml = None
            if found:
                yield found
            call.check()
    finally:
        if _logs.get(job) is log:
            del _logs[job]
        log.close()
        if nvml is not None:
            nvml.close()


def recent(call: Call, job: str, age_s: float) -> List[Dict[str, Any]]:
    """Return problems in the kernel's log, of the disks and of the container, after an attempt has failed.

    Args:
        age_s: without a watch: older lines of the kernel's log are ignored. With one, it knows what is new.
    """
    watched = _logs.get(job)
    log = KernelLog(age_s) if watched is None else watched
    seen = _Seen(parts.known_cards(job), ContainerWatch(job))
    try:
        return seen.slowly(job) + seen.container.counts() + [_named(item, job, seen) for item in log.all()]
    finally:
        if watched is None:
            log.close()


class _Seen:
    """Remembers what has been reported."""

    def __init__(self, cards: Dict[int, Dict[str, str]], container: ContainerWatch) -> None:
        self.cards = cards
        self.container = container
        self._lost: Dict[int, str] = {}
        self._ecc: Dict[int, int] = {}
        self._full: Dict[str, bool] = {}
        self._ports: Dict[str, bool] = {}
        self._slow_s = 0.0
        self._docker_root = ""

    def gpus(self, said: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Return the news in an answer of NVML."""
        found: List[Dict[str, Any]] = []
        for gpu in said.get("gpus", []):
            index, count = gpu["index"], gpu["ecc"]
            found += [{"kind": "xid", "gpu": index, "xid": number} for number in gpu["xids"]]
            if gpu["lost"] and gpu["lost"] != self._lost.get(index):
                found.append({"kind": "lost", "gpu": index, "text": gpu["lost"]})
            self._lost[index] = gpu["lost"]
            if count is not None:
                before = self._ecc.setdefault(index, count)
                if count > before:
                    found.append({"kind": "ecc", "gpu": index, "count": count, "before": before})
                self._ecc[index] = count
        return found

    def slowly(self, job: str) -> List[Dict[str, Any]]:
        """Check disks, and the ranks' pids, if it is time again."""
        if time.monotonic() - self._slow_s < SLOW_S:
            return []
        self._slow_s = time.monotonic()
        _remember(job, self._slow_s)
        if not self._docker_root:
            self._docker_root = str(probe.collect_docker_facts().get("root") or "/")
        disks = [found for what, path in self._disks(job) for found in self._disk(what, path)]
        return disks + list(self._links(facts.port_states(probe.Roots().sysfs)))

    def _links(self, states: Dict[str, str]) -> Iterator[Dict[str, Any]]:
        for device, state in states.items():
            is_up = state == "ACTIVE"
            if self._ports.get(device) and not is_up:
                yield {"kind": "link", "device": device, "state": state}
            self._ports[device] = is_up

    def filled(self, job: str, call: Call) -> List[Dict[str, Any]]:
        """Return whether the container filled a disk, and was killed for it."""
        return self.container.disk(call, self._disks(job)) if self._docker_root else []

    def _disks(self, job: str) -> Iterator["tuple[str, str]"]:
        yield "Docker's disk", self._docker_root
        outputs = parts.outputs_folder(job)
        if os.path.isdir(outputs):
            yield "the outputs' disk", outputs

    def _disk(self, what: str, path: str) -> Iterator[Dict[str, Any]]:
        try:
            found = os.statvfs(path)
        except OSError:
            return
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        full = free < min(LEAST_FREE, total // 50)
        if full and not self._full.get(path):
            yield {"kind": "disk", "what": what, "path": path, "free_bytes": free}
        self._full[path] = full


def ranks(job: str) -> Dict[int, int]:
    """Return pid → rank of the job's processes on this host, from the variables of Horovod or MPI."""
    return {one.process.pid: one.rank for one in rank_processes.of_job(job)}


def rank_of(job: str, pid: int) -> Optional[int]:
    """Return the rank of a process that is, or was recently, one of the job's."""
    seen = _ranks.get(job, {}).get(pid)
    return None if seen is None else seen[0]


def _remember(job: str, now_s: float) -> None:
    """Note the ranks' pids, and forget those of processes that ended long ago."""
    seen = _ranks.get(job, {})
    seen = {pid: known for pid, known in seen.items() if now_s - known[1] <= REMEMBERED_S}
    _ranks[job] = {**seen, **{pid: (rank, now_s) for pid, rank in ranks(job).items()}}


def _named(item: Dict[str, Any], job: str, seen: _Seen) -> Dict[str, Any]:
    """Add to a line what only this host knows: the killed rank, the GPUs' PCI addresses."""
    pids = _PIDS.search(item["line"])
    pid = int(pids.group(1) or pids.group(2)) if pids else None
    rank = None if pid is None else rank_of(job, pid)
    cards = {str(index): facts.get("pci_bus", "") for index, facts in seen.cards.items()}
    counted = seen.container.counted() if pids else None
    memory = None if counted is None else memory_of(counted)
    return {**item, "kind": "kernel", "rank": rank, "cards": cards, "memory": memory}


OPS = {"watch": watch, "recent": recent}
