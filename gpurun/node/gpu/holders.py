"""Find the processes that hold a GPU: the last check of a fence (docs/decisions/0008-gpus-are-proven-free.md).

NVML lists them. Without NVML, gpurun looks for processes with ``/dev/nvidiaN`` open, as far as this user may see them.
A host without such a device has no GPU that could be held.
"""

import os
from typing import Any, Dict, Iterable, List, Optional

from gpurun.node.agent.processes import Process, environment_of, open_files, read_process
from gpurun.node.gpu import nvml_facts
from gpurun.node.gpu.claim_rules import Card
from gpurun.node.gpu.nvml_apart import NoAnswer, Nvml


class Users:
    """The processes that were found.

    Attributes:
        holders: ``{"gpu", "pid", "user", "command", "container"}`` of each process that holds a GPU.
        problem: why some GPU could not be checked; "" if all were.
    """

    def __init__(self, holders: List[Dict[str, Any]], problem: str) -> None:
        self.holders = holders
        self.problem = problem


def find(nvml: Nvml, cards: List[Card], proc: str = "/proc") -> Users:
    """Return the processes that hold these GPUs now. Never raises: `problem` has what cannot be known."""
    try:
        said = nvml.ask(cards)
    except NoAnswer as error:
        return Users([], str(error))
    problems = ["GPU %d: %s" % (gpu["index"], gpu["lost"]) for gpu in said.get("gpus", []) if gpu["lost"]]
    if "missing" in said:
        silent = [index for index, _ in cards]
    else:
        silent = [gpu["index"] for gpu in said["gpus"] if gpu["pids"] is None and not gpu["lost"]]
    by_gpu = {gpu["index"]: gpu["pids"] for gpu in said.get("gpus", []) if gpu["pids"]}
    by_gpu.update(_by_device(silent, proc))
    gpus = [{"index": index, "processes": [{"pid": pid} for pid in pids]} for index, pids in sorted(by_gpu.items())]
    nvml_facts.name_processes(gpus, proc, {})
    holders = [
        {"gpu": gpu["index"], **{key: one[key] for key in ("pid", "user", "command", "container")}}
        for gpu in gpus
        for one in gpu["processes"]
        if _holds(one["pid"], proc)
    ]
    return Users(holders, "; ".join(problems))


def _holds(pid: int, proc: str) -> bool:
    """Return whether a listed process holds anything. A zombie does not, unless its other threads are stuck in the
    driver.

    Assumes so for a process that cannot be looked up, because the driver lists it. If it was just ending, the next look
    does not show it.
    """
    try:
        return read_process(pid) is not None or len(os.listdir("%s/%d/task" % (proc, pid))) != 1
    except OSError:
        return True


def _by_device(gpus: Iterable[int], proc: str) -> Dict[int, List[int]]:
    """Return GPU → processes that have its device open, for GPUs without NVML's answer. Only root sees other users'."""
    folder = os.environ.get("GPURUN_DEV") or "/dev"
    paths = {"%s/nvidia%d" % (folder, gpu): gpu for gpu in gpus}
    if not any(os.path.exists(path) for path in paths):
        return {}
    found: Dict[int, List[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir(proc))):
        for gpu in {paths[path] for path in open_files(pid, proc).values() if path in paths}:
            found.setdefault(gpu, []).append(pid)
    return found


def of_job(holder: Dict[str, Any], job: str, containers: Iterable[str], proc: str = "/proc") -> Optional[Process]:
    """Return the holder's process if it is one of the job's: in its containers, or left over from one."""
    process = read_process(holder["pid"])
    if process is None or process.uid != os.getuid():
        return None
    ours = any(holder["container"] and ident.startswith(holder["container"]) for ident in containers)
    return process if ours or (environment_of(holder["pid"], proc) or {}).get("GPURUN_JOB") == job else None
