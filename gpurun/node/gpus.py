"""Who holds this host's GPUs, and how busy a job's GPUs are: NVML's answers as one item for each GPU."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Iterable, List, Optional

from gpurun.node.agent.processes import Process, command_line, container_of, environment_of, open_files, read_process
from gpurun.node.claim_rules import Card
from gpurun.node.nvml import name_processes
from gpurun.node.nvml_apart import NoAnswer, Nvml, is_reader

# Find the processes that hold a GPU: the last check of a fence (docs/decisions/0008-gpus-are-proven-free.md).


class Users:
    """The processes that were found.

    Attributes:
        holders: ``{"gpu", "pid", "user", "command", "container"}`` of each process that holds a GPU.
        problem: why some GPU could not be checked; "" if all were.
    """

    def __init__(self, holders: List[Dict[str, Any]], problem: str) -> None:
        self.holders = holders
        self.problem = problem


def find_holders(nvml: Nvml, cards: List[Card], proc: str = "/proc", since: int = 0) -> Users:
    """Return the processes that hold these GPUs now. Never raises: `problem` has what cannot be known.

    Args:
        since: older processes do not count, as in `Process.started`.
    """
    try:
        said = nvml.ask(cards)
    except NoAnswer as error:
        return Users([], str(error))
    problems = ["GPU %d: %s" % (gpu["index"], gpu["lost"]) for gpu in said.get("gpus", []) if gpu["lost"]]
    if "missing" in said:
        silent = [index for index, _ in cards]
    else:
        silent = [gpu["index"] for gpu in said["gpus"] if gpu["pids"] is None and not gpu["lost"]]
    by_gpu: Dict[int, List[int]] = {}
    desktop: Dict[int, List[int]] = {}
    for gpu in said.get("gpus", []):
        drawing = {pid: _is_a_jobs(pid, proc) for pid in gpu.get("draws", ())}
        desktop[gpu["index"]] = [pid for pid, is_a_jobs in drawing.items() if not is_a_jobs]
        pids = [*(gpu["pids"] or ()), *(pid for pid, is_a_jobs in drawing.items() if is_a_jobs)]
        by_gpu[gpu["index"]] = [pid for pid in pids if not _is_older(pid, since)]
    ended = [gpu for gpu, pids in by_gpu.items() if not all(_lives(pid, proc) for pid in pids)]
    opened = _by_device([*silent, *ended], proc)
    opened = {
        gpu: [pid for pid in pids if pid not in desktop.get(gpu, ()) and not _is_older(pid, since)]
        for gpu, pids in opened.items()
    }
    for gpu in ended:
        by_gpu[gpu] = _with_heirs(by_gpu[gpu], opened.pop(gpu, []), proc)
    by_gpu.update(opened)
    gpus: List[Dict[str, Any]] = [
        {"index": index, "processes": [{"pid": pid} for pid in pids]} for index, pids in sorted(by_gpu.items())
    ]
    name_processes(gpus, proc, {})
    holders = [
        {"gpu": gpu["index"], **{key: one[key] for key in ("pid", "user", "command", "container")}}
        for gpu in gpus
        for one in gpu["processes"]
    ]
    return Users(holders, "; ".join(problems))


def _is_older(pid: int, since: int) -> bool:
    process = read_process(pid) if since else None
    return process is not None and process.started < since


def _is_a_jobs(pid: int, proc: str) -> bool:
    return "GPURUN_JOB" in (environment_of(pid, proc) or {})


def _lives(pid: int, proc: str) -> bool:
    """Return whether a process has not ended. A zombie has not if other threads of it are stuck in the driver."""
    try:
        return read_process(pid) is not None or len(os.listdir("%s/%d/task" % (proc, pid))) != 1
    except OSError:
        return False


def _with_heirs(listed: List[int], opened: List[int], proc: str) -> List[int]:
    """Return a GPU's holders if some of those that NVML lists have ended: their children with the device open.

    Without such a child, a zombie holds nothing. A process that cannot be looked up does, because the driver lists it.
    If it was just ending, the next look does not show it.
    """
    living = [pid for pid in listed if _lives(pid, proc)]
    heirs = [pid for pid in opened if pid not in listed]
    unknown = [pid for pid in listed if not os.path.exists("%s/%d" % (proc, pid))]
    return [*living, *(heirs or unknown)]


def _only_reads(pid: int, proc: str) -> bool:
    """Return whether a process is one of gpurun's own. One in a job's container is not, whatever it calls itself."""
    here = container_of(os.getpid(), proc)
    return is_reader(command_line(pid, proc)) and container_of(pid, proc) == here


def _by_device(gpus: Iterable[int], proc: str) -> Dict[int, List[int]]:
    """Return GPU → processes that have its device open, except gpurun's own. Only root sees other users' processes."""
    folder = os.environ.get("GPURUN_DEV") or "/dev"
    paths = {"%s/nvidia%d" % (folder, gpu): gpu for gpu in gpus}
    if not any(os.path.exists(path) for path in paths):
        return {}
    found: Dict[int, List[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir(proc))):
        held = {paths[path] for path in open_files(pid, proc).values() if path in paths}
        if held and not _only_reads(pid, proc):
            for gpu in held:
                found.setdefault(gpu, []).append(pid)
    return found


def of_job(holder: Dict[str, Any], job: str, containers: Iterable[str], proc: str = "/proc") -> Optional[Process]:
    """Return the holder's process if it is one of the job's: in its containers, or left over from one."""
    process = read_process(holder["pid"])
    if process is None or process.uid != os.getuid():
        return None
    ours = any(holder["container"] and ident.startswith(holder["container"]) for ident in containers)
    return process if ours or (environment_of(holder["pid"], proc) or {}).get("GPURUN_JOB") == job else None


FIRST_S, EVERY_S = 5.0, 30.0
BUSY_PERCENT = 50
LINK = "pcie_width", "pcie_max_width", "pcie_generation", "pcie_max_generation"
"""The first lines come after 5, 10 and 20 s, then one every half minute: what follows the last is not counted. With
lines after 5 and 35 s only, a job of 24 s that kept an H200 at 99 % was 1 % busy, because its first 5 s were its start.
"""


class UseTally:
    """Adds up NVML's answers. Each GPU has the index and UUID of its card."""

    def __init__(
        self, cards: Iterable[Card], clock: Callable[[], float] = time.monotonic, every_s: float = EVERY_S
    ) -> None:
        self._uuids = dict(cards)
        self._clock = clock
        self._every_s = every_s
        self._gap_s = min(FIRST_S, every_s)
        self._due_s = clock() + self._gap_s
        self._seen: Dict[int, List[Dict[str, Any]]] = {}

    def add(self, said: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Add one answer of NVML. Returns the item for the head when it is due, else nothing.

        The item is ``{"kind": "use", "gpus": [{"index", "uuid", "samples", "mean", "most", "memory_mib"}…]}``: use in
        percent, and the most memory in use. If NVML said so, each GPU also has ``sm_mhz``, the mean clock while it was
        busy, ``throttle``, the faults that held the clock down most of the time, and the last state of its PCIe link.
        """
        for gpu in said.get("gpus", []):
            if gpu.get("use") is not None:
                self._seen.setdefault(gpu["index"], []).append(gpu)
        if not self._seen or self._clock() < self._due_s:
            return []
        self._due_s, self._gap_s = self._clock() + self._gap_s, min(2 * self._gap_s, self._every_s)
        seen, self._seen = self._seen, {}
        return [{"kind": "use", "gpus": [self._line(index, each) for index, each in sorted(seen.items())]}]

    def _line(self, index: int, each: List[Dict[str, Any]]) -> Dict[str, Any]:
        uses = [gpu["use"] for gpu in each]
        clocks = [gpu["sm_mhz"] for gpu in each if gpu.get("sm_mhz") and gpu["use"] >= BUSY_PERCENT]
        reasons = [reason for gpu in each for reason in gpu.get("throttle") or ()]
        links = {key: gpu[key] for gpu in each for key in LINK if gpu.get(key) is not None}
        return {
            **links,
            **({"sm_mhz": round(sum(clocks) / len(clocks))} if clocks else {}),
            **({"throttle": often} if (often := _often(reasons, len(each))) else {}),
            "index": index,
            "uuid": self._uuids.get(index, ""),
            "samples": len(uses),
            "mean": round(sum(uses) / len(uses), 1),
            "most": max(uses),
            "memory_mib": max(gpu.get("memory_mib") or 0 for gpu in each),
        }


def _often(reasons: List[str], samples: int) -> List[str]:
    return sorted({reason for reason in reasons if 2 * reasons.count(reason) >= samples})
