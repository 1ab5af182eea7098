"""Python imports this module when it starts in a rank: it lets gpurun see where a rank hangs, whatever its script is.

A signal that no program uses makes Python print the stack of its main thread to a file of the rank. The handler is
``faulthandler``'s: it also works while the thread waits in C code, needs no debugger, and the program goes on. Other
threads are left out: `faulthandler` reads their frames while they run, and has then ended healthy programs by SIGSEGV.
`gpurun.node.job.hang` sends the signal and reads the file.

PyTorch keeps its last collectives if a variable says so ("flight recorder"). The variables that are not set get a
value here, under the names that the installed PyTorch knows: a newer one warns of the old names.

Standard library only, for every Python 3. Python 2 prints no stacks, but starts as ever. A `sitecustomize` that would
have been imported without this one is imported as well. Nothing here may keep a program from starting.
"""

import importlib
import os
import sys

SIGNAL = 57
"""A real-time signal: no library reacts to it. `gpurun.node.job.hang` has the same number."""
STACKS = "stacks"
"""The file of the stacks, in the rank's folder."""
RECORDER = "recorder.%s"
"""The folder of PyTorch's flight recorder, in the job's `run` folder; `%s` is the attempt."""
KEPT = "200"
"""How many collectives a rank remembers: the last ones tell, and their file is written and read at once."""
OLD_NAMES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_PIPE_FILE")
"""Since PyTorch 2.8."""
_HIGH = 200
"""The least number of the file's descriptor: a program may close all low ones, and use their numbers again."""


def _watch_stacks(run, rank):
    # type: (str, str) -> None
    import faulthandler  # noqa: PLC0415 - a Python that has none starts as well
    import fcntl  # noqa: PLC0415

    path = os.path.join(run, "ranks", rank, STACKS)
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # this process may open only a few files
        return
    finally:
        os.close(low)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=False, chain=False)


def _record_collectives(run, attempt):
    # type: (str, str) -> None
    version = _torch_version()
    if version is None:
        return
    names = NAMES if version >= (2, 8) else OLD_NAMES
    folder = os.path.join(run, RECORDER % attempt)
    values = KEPT, os.path.join(folder, "dump_"), os.path.join(folder, "pipe_")
    found = [name for name in NAMES + OLD_NAMES if name in os.environ]
    if found and os.environ.get(names[2]) != values[2]:
        return  # the user has said what to record, and where
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
    except OSError:
        pass  # of two ranks, one makes it
    if os.access(folder, os.W_OK | os.X_OK) and os.path.isdir(folder):
        os.environ.update(zip(names, values))
        return
    for name in names:  # PyTorch ends a program that can make no pipe there, and this one may have dropped its rights
        os.environ.pop(name, None)


def _torch_version():
    # type: () -> tuple[int, int] | None
    """Return (major, minor) of the PyTorch that this Python would import, without importing it; None if there is
    none.
    """
    for folder in sys.path:
        try:
            with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as stream:
                text = stream.read(4096)
        except (OSError, ValueError):
            continue
        after = text.partition("__version__ = ")[2].strip("'\"")
        numbers = after.split(".")[:2]
        return int(numbers[0]), int(numbers[1])
    return None


def _import_next():
    # type: () -> None
    """Import the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    mine = sys.modules.pop("sitecustomize", None)
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if os.path.abspath(folder or ".") != here]
    rest = sys.path[:]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine
    finally:
        if sys.path == rest:
            sys.path[:] = path
        else:  # it has changed the path: only the entry of this folder is missing
            sys.path.extend(folder for folder in path if os.path.abspath(folder or ".") == here)


def _main():
    # type: () -> None
    mark, run = os.environ.get("GPURUN_RANK_ID", ""), os.environ.get("GPURUN_RUN", "")
    parts = mark.split("/")
    if run and len(parts) == 3:
        for step, argument in ((_watch_stacks, "/".join(parts[1:])), (_record_collectives, parts[1])):
            try:
                step(run, argument)
            except Exception:  # noqa: BLE001, S110 - a rank starts whatever happens here
                pass


_main()
_import_next()
