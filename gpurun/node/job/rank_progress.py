"""Read the ranks' progress reports (`gpurun.runtime`). Their program may have put anything in their place."""

import errno
import hashlib
import itertools
import json
import os
import stat
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gpurun.node.agent.call import Call
from gpurun.node.job import job_parts

_MOST_TOLD = 64
_MOST_TOLD_BYTES = 4 << 20
"""All that ranks of one host tell; a program can leave a million such files."""
_MOST_NAMES = 1 << 14


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
    folder = os.path.join(job_parts.folder(job), "run")
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
            ranks.setdefault(rank, {})[kind] = _plain(json.loads(content))
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
    folder = os.path.join(job_parts.folder(job), "run")
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


def _plain(told: Any) -> Any:
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
