"""What training code may import inside a gpurun container. Standard library only, nothing to install.

    import gpurun_runtime as gpurun

    gpurun.gang().rank, gpurun.gang().size, gpurun.gang().addresses
    gpurun.progress(step, of=total)      # the job is alive, and this far
    gpurun.report(step, accuracy=0.9)    # what a sweep compares its trials by, and what is kept of a run
    gpurun.parameters()                  # this trial's hyperparameters
    gpurun.outputs()                     # the folder that is kept across attempts
    gpurun.checkpointed(step)            # work up to here is safe
    if gpurun.stopping(): ...            # SIGTERM came: save and leave

Outside a gpurun job every call works and does nothing, so that the same script runs on a laptop.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional

__all__ = ["GangOfRank", "checkpointed", "gang", "job", "outputs", "parameters", "progress", "report", "stopping"]

_FOLDER = os.environ.get("GPURUN_RUN")
_MIN_INTERVAL_S = 1.0

_stopping = threading.Event()
_last_s = 0.0
_told_rank = os.environ.get("HOROVOD_RANK")


class GangOfRank(NamedTuple):
    """Where this rank is among the others, whatever started them.

    Attributes:
        rank: its number, from 0; `size`: how many there are.
        local_rank: its number on its host, from 0; `local_size`: how many the host has.
        node: the number of its host, from 0.
        hosts: the hosts' names in rank order, as the inventory has them; `addresses`: theirs on the fabric.
        port: a TCP port that is free for the gang's own use on the first host; 0 = not known.
        role: what this rank does, such as ``worker`` or ``ps``; "" where all are alike. `role_index`: its number in it.
        roles: role → where each of its ranks listens, as ``address:port``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    hosts: List[str]
    addresses: List[str]
    port: int
    role: str
    role_index: int
    roles: Dict[str, List[str]]


def gang() -> GangOfRank:
    """This rank and the others. Outside gpurun a gang of one.

    An elastic gang comes and goes: rank and size are those of now, the hosts those at the start of this rank's host.
    """
    path = os.environ.get("GPURUN_GANG")
    if not path:
        return GangOfRank(_number("RANK", 0), _number("SIZE", 1), 0, 1, 0, ["localhost"], ["127.0.0.1"], 0, "", 0, {})
    with open(path) as stream:
        told = json.load(stream)
    hosts = told["hosts"]
    ranks = [(node, local) for node, host in enumerate(hosts) for local in range(host["gpus"])]
    rank = int(_rank())
    node, local = ranks[rank] if rank < len(ranks) else (0, 0)
    return GangOfRank(
        rank=rank,
        size=_number("SIZE", len(ranks)),
        local_rank=_number("LOCAL_RANK", local),
        local_size=_number("LOCAL_SIZE", hosts[node]["gpus"]),
        node=_number("NODE", node),
        hosts=[host["name"] for host in hosts],
        addresses=[host["address"] for host in hosts],
        port=int(told["port"]) if os.environ.get("GPURUN_PORT") else 0,
        role=os.environ.get("GPURUN_ROLE", ""),
        role_index=_number("ROLE_INDEX", 0),
        roles=told.get("roles", {}),
    )


def _number(what: str, otherwise: int) -> int:
    """What the launcher says, in its own words."""
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "GPURUN_"):
        if os.environ.get(prefix + what):
            return int(os.environ[prefix + what])
    return otherwise


def job() -> Optional[str]:
    """The job's id, or None outside gpurun."""
    return os.environ.get("GPURUN_JOB")


def outputs() -> str:
    """The folder for checkpoints and results, kept across attempts; the working directory if the job has none."""
    return os.environ.get("GPURUN_OUTPUTS") or os.getcwd()


def parameters() -> Dict[str, Any]:
    """This trial's parameters as a dictionary; empty if there are none."""
    found: Dict[str, Any] = json.loads(os.environ.get("GPURUN_PARAMETERS") or "{}")
    return found


def progress(step: int, of: Optional[int] = None, **metrics: float) -> None:
    """Say that this rank is alive and how far it is. Cheap: written at most once a second.

    Args:
        step: how many steps are done.
        of: how many there are in all.
        metrics: numbers to show beside it, such as ``loss=0.3``.
    """
    _progress(step, of, metrics)


def _progress(step: int, of: Optional[int], metrics: Dict[str, float]) -> None:
    global _last_s
    now = time.monotonic()
    if now - _last_s >= _MIN_INTERVAL_S:
        _last_s = now
        _tell_rank()
        _write("progress", {"step": int(step), "of": of, "metrics": {k: float(v) for k, v in metrics.items()}})


def report(step: int, **metrics: float) -> None:
    """Report metrics of a step, such as ``accuracy=0.9``: each call is kept, and says that this rank is alive.

    Where several ranks report one metric, that of the lowest counts.
    """
    told = {"time": time.time(), "step": int(step), "metrics": {k: float(v) for k, v in metrics.items()}}
    _progress(step, None, metrics)
    folder = _rank_folder()
    if folder is None:
        return
    try:
        descriptor = os.open(os.path.join(folder, "m"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(told) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError:
        pass  # telling must never end the training


def checkpointed(step: int) -> None:
    """Say that work up to `step` is safe in `outputs()`: a restart loses only what comes after."""
    _write("checkpoint", {"step": int(step)})


def stopping() -> bool:
    """True once the gang has been told to stop (SIGTERM). The first call installs the handler.

    Call it once before training begins; a rank that never calls it is ended by SIGTERM as usual.
    """
    if not _stopping.is_set() and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    return _stopping.is_set()


def _rank() -> str:
    names = "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "GPURUN_RANK"
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


def _tell_rank() -> None:
    """Say this rank's number if it has changed: elastic Horovod counts the ranks anew after each change of the gang."""
    global _told_rank
    now, folder = _rank_now(), _rank_folder()
    if now is None or now == _told_rank or folder is None:
        return
    path = os.path.join(folder, "now")
    try:
        with open(path + ".tmp", "w") as stream:
            stream.write(now)
        os.replace(path + ".tmp", path)
        _told_rank = now
    except OSError:
        pass  # it is tried again with the next progress


def _rank_folder() -> Optional[str]:
    """Return the folder of the reports of this rank's script (`gpurun.launch.rank`)."""
    ident = os.environ.get("GPURUN_RANK_ID", "").split("/")
    return os.path.join(_FOLDER, "ranks", ident[1], ident[2]) if _FOLDER and len(ident) == 3 else None


def _rank_now() -> Optional[str]:
    """What Horovod says, if the program uses it; None while Horovod counts."""
    for name in ("horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras", "horovod.mxnet"):
        horovod = sys.modules.get(name)
        try:
            if horovod is not None and horovod.is_initialized():
                return str(int(horovod.rank()))
        except Exception:  # noqa: BLE001 - telling about progress must never end the training
            return None
    return None


def _write(kind: str, value: Dict[str, Any]) -> None:
    """One small file per rank and kind, replaced whole: whoever reads it sees the old value or the new one."""
    if not _FOLDER:
        return
    path = os.path.join(_FOLDER, "%s.%s" % (kind, _rank()))
    try:
        with open(path + ".tmp", "w") as stream:
            json.dump({"time": time.time(), **value}, stream)
        os.replace(path + ".tmp", path)
    except OSError:
        pass  # telling about progress must never end the training
