"""What the kernel counted in the control group of a job's container: memory, and processes that it refused.

Reads cgroup v2 (``memory.events``, ``memory.peak``) and v1 (``memory.oom_control``, ``memory.max_usage_in_bytes``),
which every user of the host may read. A group disappears with the last process of its container, so the script of a
rank that fails leaves copies of these files (`gpurun.launch.rank`). They are the container's word: no link in them is
followed, and nothing waits for a pipe.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import os
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

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
