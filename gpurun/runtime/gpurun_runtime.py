"""The module that training code can import inside a gpurun container. Standard library only, no installation.

    import gpurun_runtime as gpurun

    gpurun.gang().rank, gpurun.gang().size, gpurun.gang().addresses
    gpurun.progress(step, of=total)      # report that the job is alive, and its progress
    with gpurun.compute(): ...           # this rank's own work in a step: gpurun names slow ranks
    gpurun.report(step, accuracy=0.9)    # metrics that a sweep compares, and that the run keeps
    gpurun.parameters()                  # this trial's hyperparameters
    gpurun.outputs()                     # the folder that gpurun keeps across attempts
    gpurun.checkpointed(step)            # the work up to this step is saved
    if gpurun.stopping(): ...            # after SIGTERM: save and exit

Outside a gpurun job, every call works without effect, so that the same script runs on a laptop.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

__all__ = [
    "GangOfRank", "checkpointed", "compute", "gang", "job", "outputs", "parameters", "progress", "report", "stopping",
]  # fmt: skip

_FOLDER = os.environ.get("GPURUN_RUN")
_MIN_INTERVAL_S = 1.0
_STEPS_S, _LEAST_STEPS, _MOST_STEPS = 60.0, 5, 256
"""The median of a step's own work is that of the last minute's steps, of at least and at most so many."""

_stopping = threading.Event()
_last_s = 0.0
_moved_s: Optional[float] = None
_saved_s = 0.0
_is_cut = False
_told_rank = os.environ.get("HOROVOD_RANK")


class GangOfRank(NamedTuple):
    """This rank's place in the gang, for every launcher.

    Attributes:
        rank: its number, from 0; `size`: the number of ranks.
        local_rank: its number on its host, from 0; `local_size`: the number of ranks on the host.
        node: the number of its host, from 0.
        hosts: the inventory's names of the hosts, in rank order; `addresses`: their addresses on the fabric.
        port: a free TCP port on the first host for the gang's own use; 0 = not known.
        role: the role of this rank, such as ``worker`` or ``ps``; "" if all ranks are equal. `role_index`: its number
            in the role.
        roles: role → the addresses on which its ranks listen, as ``address:port``.
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
    """Return this rank and its gang. Outside gpurun, this is a gang of one rank.

    In an elastic gang, rank and size are the current values; the hosts are those at the start of this rank's host.
    """
    path = os.environ.get("GPURUN_GANG")
    if not path:
        return GangOfRank(_number("RANK", 0), _number("SIZE", 1), 0, 1, 0, ["localhost"], ["127.0.0.1"], 0, "", 0, {})
    with open(path) as stream:
        told = json.load(stream)
    hosts, started = told["hosts"], _started() if told.get("one_per_host") else {}
    ranks = [(node, local) for node, host in enumerate(hosts) for local in range(host.get("ranks", host["gpus"]))]
    rank = int(_rank())
    node, local = ranks[rank] if rank < len(ranks) else (0, 0)
    return GangOfRank(
        rank=started.get("RANK", rank),
        size=started.get("WORLD_SIZE", _number("SIZE", len(ranks))),
        local_rank=started.get("LOCAL_RANK", _number("LOCAL_RANK", local)),
        local_size=started.get(
            "LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", hosts[node].get("ranks", hosts[node]["gpus"]))
        ),
        node=_number("NODE", node),
        hosts=[host["name"] for host in hosts],
        addresses=[host["address"] for host in hosts],
        port=int(told["port"]) if os.environ.get("GPURUN_PORT") else 0,
        role=os.environ.get("GPURUN_ROLE", ""),
        role_index=_number("ROLE_INDEX", 0),
        roles=told.get("roles", {}),
    )


def _started() -> Dict[str, int]:
    """Return the numbers that a launcher gave to this process, if the only process of the host is that launcher."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return {name: int(os.environ[name]) for name in names} if all(os.environ.get(name) for name in names) else {}


def _number(what: str, otherwise: int) -> int:
    """Return the launcher's value, from the launcher's own variable."""
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "GPURUN_"):
        if os.environ.get(prefix + what):
            return int(os.environ[prefix + what])
    return otherwise


def job() -> Optional[str]:
    """Return the job's id, or None outside gpurun."""
    return os.environ.get("GPURUN_JOB")


def outputs() -> str:
    """Return the folder for checkpoints and results, kept across attempts; without outputs, the working directory."""
    return os.environ.get("GPURUN_OUTPUTS") or os.getcwd()


def parameters() -> Dict[str, Any]:
    """Return this trial's parameters as a dictionary; empty if there are none."""
    found: Dict[str, Any] = json.loads(os.environ.get("GPURUN_PARAMETERS") or "{}")
    return found


class _Own:
    """How long this rank's own work takes, by its monotonic clock: the marked blocks between two reported steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked_s = 0.0
        self._step: Optional[int] = None
        self._steps: Deque[Tuple[float, float]] = deque(maxlen=_MOST_STEPS)
        self._count = 0

    def add(self, took_s: float) -> None:
        with self._lock:
            self._marked_s += took_s

    def step(self, step: int, now_s: float) -> None:
        """Divide what was marked since the last step over the steps since. A step that is no later begins anew."""
        with self._lock:
            before, self._step = self._step, step
            if before is None or step <= before:
                self._marked_s = self._marked_s if step == before else 0.0
                return
            marked_s, self._marked_s = self._marked_s, 0.0
            if marked_s > 0.0:
                self._steps.append((now_s, marked_s / (step - before)))
                self._count += 1

    def told(self, now_s: float) -> Dict[str, Any]:
        """Return the median of the last steps' own work, and how many steps were measured so far."""
        with self._lock:
            late = [took_s for at_s, took_s in self._steps if now_s - at_s <= _STEPS_S]
            late = late if len(late) >= _LEAST_STEPS else [took_s for _, took_s in self._steps][-_LEAST_STEPS:]
            return {"compute_s": sorted(late)[len(late) // 2], "computed": self._count} if late else {}


_own = _Own()


@contextlib.contextmanager
def compute(wait: Optional[Callable[[], Any]] = None) -> Iterator[None]:
    """Mark this rank's own work in a step: what it does before it waits for other ranks.

    All ranks of a gang wait for the slowest one, so their steps take equally long. gpurun compares the marked time of
    equal ranks, and names a rank that needs clearly more. Mark any number of blocks in a step; call `progress` or
    `report` after each step. A block that raises does not count.

    Args:
        wait: called at the end of the block, such as ``torch.cuda.synchronize``: a GPU may still be at work.
    """
    began_s = time.monotonic()
    yield
    if wait is not None:
        wait()
    _own.add(time.monotonic() - began_s)


def progress(step: int, of: Optional[int] = None, **metrics: float) -> None:
    """Report that this rank is alive, and its progress. Cheap: written at most once a second.

    Args:
        step: the number of finished steps.
        of: the total number of steps.
        metrics: numbers to show with the progress, such as ``loss=0.3``.
    """
    _progress(step, of, metrics)


def _progress(step: int, of: Optional[int], metrics: Dict[str, float]) -> None:
    global _last_s, _moved_s
    now = _moved_s = time.monotonic()
    _own.step(int(step), now)
    if now - _last_s >= _MIN_INTERVAL_S:
        _last_s = now
        _tell_rank()
        told = {"step": int(step), "of": of, "metrics": {k: float(v) for k, v in metrics.items()}}
        _write("progress", {**told, **_own.told(now)})


def report(step: int, **metrics: float) -> None:
    """Report metrics of a step, such as ``accuracy=0.9``. gpurun keeps each call; it also shows that the rank is alive.

    If several ranks report a metric, the lowest rank counts.
    """
    global _is_cut
    told = {"time": time.time(), "step": int(step), "metrics": {k: float(v) for k, v in metrics.items()}}
    _progress(step, None, metrics)
    folder = _rank_folder()
    if folder is None:
        return
    try:
        descriptor = os.open(os.path.join(folder, "m"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            line = ("\n" * _is_cut + json.dumps(told) + "\n").encode()
            _is_cut = os.write(descriptor, line) < len(line)  # by a full disk: the next one is on a line of its own
        finally:
            os.close(descriptor)
    except OSError:
        pass  # a report must never end the training


def checkpointed(step: int) -> None:
    """Report that the work up to `step` is safe in `outputs()`: a restart loses only later work.

    Call it once all ranks have written their files, on each host that writes. gpurun then keeps what it copies until
    the next change as one whole state, also if the program saves without a pause.

    The time since this rank's last `progress` or `report` counts as the time to save.
    """
    global _moved_s, _saved_s
    now = time.monotonic()
    _saved_s += 0.0 if _moved_s is None else now - _moved_s
    _moved_s = now
    _write("checkpoint", {"step": int(step), "saved_s": round(_saved_s, 3)})


def stopping() -> bool:
    """Return True after the gang received SIGTERM. The first call installs the handler.

    Call it once before the training begins. If a rank never calls it, SIGTERM ends the rank as usual.
    """
    if not _stopping.is_set() and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    return _stopping.is_set()


def _rank() -> str:
    names = "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "GPURUN_RANK"
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


def _tell_rank() -> None:
    """Report this rank's number if it has changed: elastic Horovod renumbers ranks after each change of the gang."""
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
        pass  # the next progress tries again


def _rank_folder() -> Optional[str]:
    """Return the folder of the reports of this rank's script (`gpurun.launch.rank`)."""
    ident = os.environ.get("GPURUN_RANK_ID", "").split("/")
    return os.path.join(_FOLDER, "ranks", ident[1], ident[2]) if _FOLDER and len(ident) == 3 else None


def _rank_now() -> Optional[str]:
    """Return Horovod's rank if the program uses Horovod; None while Horovod assigns ranks."""
    for name in ("horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras", "horovod.mxnet"):
        horovod = sys.modules.get(name)
        try:
            if horovod is not None and horovod.is_initialized():
                return str(int(horovod.rank()))
        except Exception:  # noqa: BLE001 - a progress report must never end the training
            return None
    return None


def _write(kind: str, value: Dict[str, Any]) -> None:
    """Write one small file per rank and kind. Replaces it atomically: a reader sees the old value or the new value."""
    if not _FOLDER:
        return
    path = os.path.join(_FOLDER, "%s.%s" % (kind, _rank()))
    try:
        with open(path + ".tmp", "w") as stream:
            json.dump({"time": time.time(), **value}, stream)
        os.replace(path + ".tmp", path)
    except OSError:
        pass  # a progress report must never end the training
