"""Say what to do about a failed rank, from what it printed last: one table of what programs say, and of its cure. Pure.

A hint must never be wrong. So most lines of the table look only at the error that ended the program, because a program
can print any error and continue. Each pattern comes from messages in public issues; tests/supervisor/test_hints.py has
them, and lines that look alike.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpurun.images.given_again import given_again
from gpurun.jobs.spec import DATA, JobSpec
from gpurun.launch import output
from gpurun.launch.docker import WORKSPACE
from gpurun.supervisor.exit_codes import FULL_SHM

MOST_LINES = 400
"""How many of the rank's last lines are looked at."""
END_LINES = 40
"""How many lines a program prints at most after the error that ends it: warnings of PyTorch, a tracker's summary."""
MOST_LETTERS = 1000
"""How much of a line is looked at."""
LAST_LINES = 3
"""How many last lines may say why a program ended that raises no exception of Python."""

_RANK = re.compile(r"\[rank\d+\]:\s?")  # PyTorch >= 2.2 puts it before each line of a traceback
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: |:?$)")
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_RELAYED = re.compile(
    r"[\w.]*\b(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException)\b"
)
"""What a program raises that only started the one that failed, such as `accelerate launch`."""


@dataclass(frozen=True)
class Failed:
    """A rank that failed.

    Attributes:
        code: its exit code; 128 + n for signal n.
        printed: the last lines that it printed.
    """

    code: int | None
    printed: Sequence[output.Line]
    spec: JobSpec
    host: str

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Return its last lines of both streams."""
        return tuple(_text(line) for line in self.printed[-MOST_LINES:])

    @cached_property
    def errors(self) -> tuple[str, ...]:
        """Return the error that ended the program, then those that led to it, as Python prints them.

        Without a Python exception, the last lines. A signal ends a program whatever it printed, but for SIGABRT.
        """
        if (self.code or 0) > 128 and self.code != 128 + signal.SIGABRT:
            return ()
        streams = [
            [_text(line) for line in self.printed[-MOST_LINES:] if line.stream == stream]
            for stream in ("stderr", "stdout")
        ]
        for lines in streams:
            if found := _raised(lines):
                return found
        last = next(filter(None, ([line for line in lines if line.strip()] for lines in streams)), [])
        return tuple(reversed(last[-LAST_LINES:]))


def _text(line: output.Line) -> str:
    return _RANK.sub("", line.text[:MOST_LETTERS], count=1)


def _raised(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the exception that Python printed last, and those that led to it; () if none is near the end."""
    heads = [at for at, line in enumerate(lines) if at and lines[at - 1][:1] == " " and _RAISED.match(line)]
    if not heads or len(lines) - heads[-1] > END_LINES:
        return ()
    found = [lines[heads[-1]]]
    for before, head in zip(reversed(heads[:-1]), reversed(heads), strict=False):
        if not (_RELAYED.match(lines[head]) or any(map(_CHAINED.match, lines[before + 1 : head]))):
            break
        found.append(lines[before])
    return tuple(found)


class Hint(NamedTuple):
    """One line of the table.

    Attributes:
        says: what the error that ended the program looks like.
        cure: what to tell; "" = this line of the table does not apply.
        anywhere: the pattern is so special that any line of the rank may have it.
    """

    says: re.Pattern[str]
    cure: Callable[[re.Match[str], Failed], str]
    anywhere: bool = False


def hint_for(failed: Failed) -> str:
    """Return what to do about a rank's failure; "" if nothing is known."""
    for hint in _HINTS:
        for line in failed.lines if hint.anywhere else failed.errors:
            if (found := hint.says.search(line)) and (cure := hint.cure(found, failed)):
                return cure
    return ""


def path_hint(env: Mapping[str, str]) -> str:
    """Return words for a container without its programs, whose user has replaced PATH; "" if nobody did."""
    path = env.get("PATH")
    if path is None:
        return ""
    literal = "; gpurun does not expand $PATH there" if "$" in path else ""
    return f"`env` replaces the image's PATH by {path!r}{literal}"


def _told(text: str) -> Callable[[re.Match[str], Failed], str]:
    return lambda _, failed: text.format(host=failed.host)


def _read_only(found: re.Match[str], failed: Failed) -> str:
    spec, path = failed.spec, _absolute(found[1], failed)
    if not path:
        return ""
    if _is_below(path, DATA):
        return f"{path} is in a data set, which is read-only: write to another folder"
    for _, target, mode in spec.mounts:
        if _is_below(path, target):
            return f"{target} is mounted read-only: give the mount `:rw`" if mode == "ro" else ""
    where = f"to {spec.outputs}" if spec.outputs else "to a folder that `outputs` names (--outputs)"
    if _is_below(path, WORKSPACE):
        return f"`workdir_read_only` makes {WORKSPACE} read-only: write {where}" if spec.workdir_read_only else ""
    return f"{path} is read-only in the container: write {where}"


def _missing(found: re.Match[str], failed: Failed) -> str:
    path = _absolute(found[1], failed)
    if not _is_below(path, WORKSPACE):
        return ""
    relative = posixpath.relpath(path, WORKSPACE)
    for name in failed.spec.left_out:
        if relative == name or relative.startswith(f"{name}/"):
            given, line = given_again(name, failed.spec.left_out)
            return (
                f"the workdir has {name} on the head, but .gitignore excludes {name}: add the line `{line}` at the end "
                f"of .gitignore, or give the path with --data NAME={given} and read the files at {DATA}/NAME"
            )
    return ""


def _module(found: re.Match[str], failed: Failed) -> str:
    name = found[1]
    if any(left in (name, f"{name}.py") for left in failed.spec.left_out):
        return f"the workdir has {name} on the head, but .gitignore excludes {name}"
    text = f"neither the image nor the script's folder has a module {name}: --requirements FILE installs packages"
    scripts = (posixpath.join(WORKSPACE, word) for word in failed.spec.command if re.fullmatch(r"\S+\.py", word))
    folder = next((posixpath.dirname(posixpath.normpath(script)) for script in scripts), WORKSPACE)
    is_deep = failed.spec.workdir is not None and folder != WORKSPACE and _is_below(folder, WORKSPACE)
    return f"{text}; for a module at the top of the workdir, add -e PYTHONPATH={WORKSPACE}" if is_deep else text


def _library(found: re.Match[str], _: Failed) -> str:
    return f"the image has no {found[1]}: use an image with this system library; pip cannot install it"


def _driver(_: re.Match[str], failed: Failed) -> str:
    is_meant = any(_DRIVER.search(line) or _NO_GPU.search(line) for line in failed.errors)
    cure = "use an image with an older CUDA, or update the host's driver"
    return f"the image's CUDA does not fit the NVIDIA driver of {failed.host}: {cure}" if is_meant else ""


def _full_shm(_: re.Match[str], failed: Failed) -> str:
    return f"probably {FULL_SHM}" if failed.code != 128 + signal.SIGBUS else ""  # else the exit code's name says so


def _in_use(_: re.Match[str], failed: Failed) -> str:
    return (
        f"another process on {failed.host} has this port, and jobs share the host's network: let the program use the "
        "port in MASTER_PORT, if the launcher sets it, or port 0"
    )


def _nccl(_: re.Match[str], failed: Failed) -> str:
    is_said = any(_NCCL_SAYS.search(line) for line in failed.lines)
    return "" if is_said else "add -e NCCL_DEBUG=WARN, so that NCCL prints why it failed"


def _no_interface(_: re.Match[str], failed: Failed) -> str:
    name = failed.spec.env.get("NCCL_SOCKET_IFNAME")
    return f"`env` sets NCCL_SOCKET_IFNAME={name}, and {failed.host} has no such interface" if name else ""


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _absolute(path: str, failed: Failed) -> str:
    """Return a path as the program meant it, if it did not change its folder; "" if that is unknown."""
    if not path or (not path.startswith("/") and failed.spec.workdir is None):
        return ""
    return posixpath.normpath(posixpath.join(WORKSPACE, path))


_NCCL_SAYS = re.compile(r"NCCL WARN|^Last error:")
_DRIVER = re.compile(
    r"CUDA driver version is insufficient for CUDA runtime version"
    r"|The NVIDIA driver on your system is too old \(found version \d+\)"
    r"|forward compatibility was attempted on non supported HW"
    r"|system has unsupported display driver / cuda driver combination"
    r"|provided PTX was compiled with an unsupported toolchain|CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
)
_NO_GPU = re.compile(
    r"No CUDA GPUs are available|torch\.cuda\.is_available\(\) is False|no CUDA-capable device is detected"
    r"|ProcessGroupNCCL is only supported with GPUs, no GPUs found"
)
_HINTS = (
    Hint(
        re.compile(
            r"killed by signal: Bus error|insufficient shared memory|failed to extend /dev/shm/"
            r"|(?:shared memory|/dev/shm|Call to posix_fallocate).*No space left on device"
        ),
        _full_shm,
        anywhere=True,
    ),
    Hint(re.compile(r"^OSError: \[Errno 30\] Read-only file system: '([^']+)'"), _read_only),
    Hint(re.compile(r"^\S+: .*?['‘]([^'’]+)['’]: Read-only file system$"), _read_only),  # GNU's programs
    Hint(re.compile(r"^\S+: (?:.*: )?(?:cannot create )?([^\s:]+): Read-only file system$"), _read_only),  # shells
    Hint(_DRIVER, _driver, anywhere=True),
    Hint(
        re.compile(r"no kernel image is available for execution on the device"),
        _told("the program was not built for the GPUs of {host}: use another image, or another --generation"),
    ),
    Hint(re.compile(r"Torch not compiled with CUDA enabled"), _told("the image's PyTorch is built for CPUs only")),
    Hint(
        re.compile(
            r"(?:CUDA|HIP) out of memory\. Tried to allocate|(?:CUDA|HIP) error: ?out of memory"
            r"|RESOURCE_EXHAUSTED: Out of memory while trying to allocate \d+"
            r"|OOM when allocating tensor with shape.* on /job:.*/device:GPU:\d+ by allocator GPU_\d+_bfc"
            r"|Cuda failure (?:2 )?'out of memory'|CUDA_ERROR_OUT_OF_MEMORY"
        ),
        _told(
            "the memory of the rank's GPU is full: try a smaller batch, or GPUs with more memory (`min_gpu_memory` in "
            "a recipe)"
        ),
    ),
    Hint(re.compile(r"\bEADDRINUSE\b|errno: 98\b|\[Errno 98\] |: [Aa]ddress already in use\b"), _in_use),
    Hint(re.compile(r"^FileNotFoundError: (?:\[Errno 2\] )?No such file or directory: '([^']+)'"), _missing),
    Hint(re.compile(r"can't open file '([^']+)': \[Errno 2\]"), _missing),
    Hint(re.compile(r"^\S+: .*?['‘]([^'’]+)['’]: No such file or directory$"), _missing),
    Hint(re.compile(r"^\S+: (?:.*: )?(?:cannot open )?([^\s:]+): No such file(?: or directory)?$"), _missing),
    Hint(re.compile(r"^ModuleNotFoundError: No module named '(\w+)'$"), _module),
    Hint(
        re.compile(r"^(?:ImportError|OSError): (lib(?!cuda\.)[\w.+-]+\.so[.\d]*): cannot open shared object"), _library
    ),
    Hint(
        re.compile(r"Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device"),
        _told(
            "two ranks use one GPU: each rank must choose its own GPU, for example with "
            "torch.cuda.set_device(LOCAL_RANK)"
        ),
        anywhere=True,
    ),
    Hint(re.compile(r"Bootstrap : no socket interface found"), _no_interface, anywhere=True),
    Hint(
        re.compile(r"Watchdog caught collective operation timeout"),
        _told(
            "the rank waited in a collective operation that other ranks did not join: look for a rank whose log ends "
            "earlier, or that failed"
        ),
        anywhere=True,
    ),
    Hint(
        re.compile(r"NCCL error.*remote process exited or there was a network error"),
        _told("NCCL lost its connection to another rank, which may have failed first"),
    ),
    Hint(re.compile(r"NCCL error.*unhandled (?:system|cuda) error"), _nccl),
)
"""The first line that applies is told, so what is more special comes first."""
