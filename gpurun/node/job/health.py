"""Report problems of a job's hardware on this host while it runs; see `watch`.

Reads the kernel's log, NVML, free disk space, and what the kernel counts of the container
(`gpurun.node.job.container_watch`). Reports only facts: it sends lines that name a GPU error or a killed process
as they are; the head interprets them (`gpurun.facts.kernel_log`, `gpurun.doctor.xids`).
"""

import collections
import os
import re
import stat
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpurun.node.agent.call import Call
from gpurun.node.gpu.nvml_apart import NoAnswer, Nvml
from gpurun.node.gpu.use import UseTally
from gpurun.node.job import job_parts, rank_processes
from gpurun.node.job.container_watch import ContainerWatch, memory_of
from gpurun.node.probe import docker_facts

EVERY_S = 1.0
SLOW_S = 2.0
"""How often disks and the ranks' pids are looked at."""
MOST_LINES = 50
"""Lines of the kernel log passed on at a time: an Xid can come a thousand times a second."""
LONGEST = 600
LEAST_FREE = 256 << 20
"""Below this, or 2 % of a smaller disk, a disk counts as full: the next checkpoint would not fit."""

_WORTH = re.compile(r"NVRM: |oom-kill:|Memory cgroup out of memory: |Out of memory: ")
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


def watch(call: Call, job: str, gpus: List[int], age_s: float) -> Iterator[List[Dict[str, Any]]]:
    """Yield problems as they happen, until cancelled. The first item may be empty: the watch has started.

    Args:
        gpus: the job's GPUs here.
        age_s: how long the attempt has run: older lines that the kernel's log has at the start are ignored.

    Yields:
        lists of ``{"kind": "kernel", "line", "age_s", "rank", "cards": GPU → PCI address}``,
        ``{"kind": "xid", "gpu", "xid"}``, ``{"kind": "lost", "gpu", "text"}``,
        ``{"kind": "ecc", "gpu", "count", "before"}``, ``{"kind": "disk", "what", "path", "free_bytes"}``,
        ``{"kind": "memory", "limit_bytes", "peak_bytes", "kills", "is_own_limit"}``, ``{"kind": "pids", "most"}``,
        ``{"kind": "filled", "what", "path", "free_bytes", "written_bytes"}``: the container filled a disk and was
        killed, ``{"kind": "nvml", "text"}``, and the items of `UseTally`.
    """
    log = _logs[job] = KernelLog(age_s)
    nvml: Optional[Nvml] = Nvml() if gpus else None
    cards = job_parts.cards(job, gpus)
    seen, use = _Seen(job_parts.known_cards(job), ContainerWatch(job)), UseTally(cards)
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
    seen = _Seen(job_parts.known_cards(job), ContainerWatch(job))
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
            self._docker_root = str(docker_facts.facts().get("root") or "/")
        return [found for what, path in self._disks(job) for found in self._disk(what, path)]

    def filled(self, job: str, call: Call) -> List[Dict[str, Any]]:
        """Return whether the container filled a disk, and was killed for it."""
        return self.container.disk(call, self._disks(job)) if self._docker_root else []

    def _disks(self, job: str) -> Iterator["tuple[str, str]"]:
        yield "Docker's disk", self._docker_root
        outputs = job_parts.outputs_folder(job)
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
