"""Watch what a job's container takes from its host: memory, processes, and the disk of Docker.

`gpurun.node.job.health` reports the news to the head. One thing is done here, because the head would be too late: the
container that fills Docker's disk is killed while its neighbours can still write.
"""

import json
import os
import time
import urllib.parse
from typing import Any, Dict, Iterator, List, Optional

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpError
from gpurun.node.job import job_lock, job_parts
from gpurun.node.job.cgroup import COPIES, Counted, counted, counted_in
from gpurun.node.job.neighbours import Neighbours

LOW_FREE = 2 << 30
"""Below this, or 5 % of a smaller disk, gpurun looks which container fills it."""
NEIGHBOURS_S = 4.0
"""How often gpurun looks which other jobs run here."""
SIZES_FACTOR = 5.0
"""Docker walks through all that containers have written: it is asked again after so many times its answer took."""


class ContainerWatch:
    """Remembers what has been reported of the job's container."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._kills = 0
        self._is_refused = False
        self._is_ended = False
        self._neighbours = Neighbours()
        self._neighbours_s = 0.0
        self._sizes_s = 0.0

    def counts(self) -> List[Dict[str, Any]]:
        """Return the news of memory and processes."""
        found: List[Dict[str, Any]] = []
        now = self.counted()
        if now is None:
            return found
        if now.kills > self._kills:
            found.append(dict(memory_of(now), kind="memory", kills=now.kills))
        if now.refused and not self._is_refused:
            found.append({"kind": "pids", "refused": now.refused, "most": now.most_processes})
        self._kills, self._is_refused = now.kills, now.refused > 0
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

    def disk(self, call: Call, path: str) -> Iterator[Dict[str, Any]]:
        """Kill the job's container if Docker's disk is nearly full and this container has written the most on it.

        Args:
            path: the folder of Docker's disk.
        """
        if self._is_ended or time.monotonic() < self._sizes_s:
            return
        try:
            found = os.statvfs(path)
        except OSError:
            return
        free, low = found.f_bavail * found.f_frsize, min(LOW_FREE, found.f_blocks * found.f_frsize // 20)
        if free >= low:
            return
        began_s = time.monotonic()
        try:
            written = self._end_the_filler(call, low)
        except (OpError, OSError, ValueError):
            written = None
        self._sizes_s = time.monotonic() + SIZES_FACTOR * (time.monotonic() - began_s)
        if written is not None:
            self._is_ended = True
            yield {"kind": "filled", "path": path, "free_bytes": free, "written_bytes": written}

    def _end_the_filler(self, call: Call, least_bytes: int) -> Optional[int]:
        """Kill the container of this job if it is the one that fills the disk; return what it has written.

        Args:
            least_bytes: who has written less does not fill the disk.
        """
        connection = docker.connect(call, timeout_s=60.0)
        try:
            filters = urllib.parse.quote(json.dumps({"label": [job_parts.LABEL]}))
            status, answer = docker.exchange(connection, "GET", "/containers/json?size=1&filters=" + filters)
            found = docker.parse(answer)
            if status != 200 or not isinstance(found, list):
                return None
            filler = max(found, key=_written, default=None)
            if filler is None or _written(filler) < least_bytes or filler["Labels"].get(job_parts.LABEL) != self._job:
                return None
            docker.exchange(connection, "POST", "/containers/%s/kill" % docker.checked_name(str(filler["Id"])))
            return _written(filler)
        finally:
            connection.close()


def memory_of(found: Counted) -> Dict[str, Any]:
    """Return what a container had and used, for a report."""
    return {"limit_bytes": found.limit_bytes, "peak_bytes": found.peak_bytes, "is_own_limit": found.is_own_limit}


def _written(container: Dict[str, Any]) -> int:
    """Return the bytes in a container's writable layer (``SizeRw``; absent if it is empty)."""
    size = container.get("SizeRw")
    return size if isinstance(size, int) else 0
