"""Watch what a job's container takes from its host: memory, processes, and the disk of Docker.

`gpurun.node.job.health` reports the news to the head. One thing is done here, because the head would be too late: the
container that fills a disk of the host is killed while its neighbours can still write.
"""

import json
import os
import time
import urllib.parse
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpError
from gpurun.node.docker import job_containers
from gpurun.node.folder.walk import walk
from gpurun.node.job import caches, job_lock, job_parts
from gpurun.node.job.cgroup import COPIES, Counted, counted, counted_in
from gpurun.node.job.neighbours import Neighbours

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
        folder = job_parts.folder(self._job)
        main = processes.noted(os.path.join(folder, job_parts.MAIN_FILE))
        now = processes.read_process(main[0]) if main else None
        found = counted(now.pid) if main and now and now.started == main[1] else None
        if found is None:
            copies = os.path.join(folder, "run", "%s.%d" % (COPIES, job_lock.owner(self._job)))
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
        own = (job_parts.outputs_folder(job), job_parts.kept_layer(job), job_parts.folder(job))
        return sum(_bytes_on(device, folder) for folder in own)

    def _caches_on(self, device: int) -> int:
        """Return the bytes of the caches that the job uses, which other jobs of its user may use, too."""
        folder = caches.folder_of_job(self._job)
        return _bytes_on(device, folder) if folder else 0

    def _kill(self, call: Call, container: str) -> bool:
        try:
            connection = docker.connect(call, timeout_s=60.0)
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
    filters = urllib.parse.quote(json.dumps({"label": [job_parts.LABEL]}))
    try:
        connection = docker.connect(call, timeout_s=60.0)
        try:
            status, answer = docker.exchange(connection, "GET", "/containers/json?size=1&filters=" + filters)
            found = docker.parse(answer) if status == 200 else None
            listed = found if isinstance(found, list) else []
            jobs = job_containers.of_jobs(listed, lambda path: docker.exchange(connection, "GET", path))
        finally:
            connection.close()
    except (OpError, OSError):
        return []
    return [
        _Written(str(each["Id"]), str(each["Labels"].get(job_parts.LABEL)), int(each.get("SizeRw") or 0))
        for each in jobs
    ]


def memory_of(found: Counted) -> Dict[str, Any]:
    """Return what a container had and used, for a report."""
    return {"limit_bytes": found.limit_bytes, "peak_bytes": found.peak_bytes, "is_own_limit": found.is_own_limit}
