"""Turn what hosts saw into causes: which host and rank is at fault, and which cause came first. Pure.

One failure causes many others: a GPU falls off the bus, its rank dies, the other ranks time out, the launcher names the
first of them. The cause is the earliest thing that a host saw and that explains the failure.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from gpurun.doctor.findings import Blame, xid
from gpurun.errors import HostFailure, NoRoom
from gpurun.facts import LinkLine, OomLine, XidLine, parse_kernel_line, same_gpu
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import FirstFailure, JobRecord, Restart, StartFailure, State
from gpurun.jobs.spec import DATA, Grant, JobSpec, given_again
from gpurun.launch import output
from gpurun.launch.container import WORKSPACE
from gpurun.quantities import count
from gpurun.scheduler.placement import serves
from gpurun.supervisor.verdict.ends import FULL_SHM, End

Kind = Literal["xid", "gpu-lost", "ecc", "oom", "disk-full", "pids", "engine", "host-lost", "link"]
_NO_SPACE = ("No space left on device", "ENOSPC", "Disk quota exceeded")
_NETWORK = re.compile(
    r"Watchdog caught collective operation timeout|remote process exited or there was a network error"
    r"|NCCL error.{0,200}unhandled system error|\bnccl(?:Remote|System)Error\b"
    r"|NET/IB\b.{0,100}(?:port error|Got completion)"
    r"|Connection (?:closed|reset) by (?:remote )?peer|Timed out waiting \d+ms for (?:send|recv)|No route to host"
)
"""What ranks print whose connections to other ranks broke, by NCCL, PyTorch and Gloo."""
LINK_S = 2100.0
"""So long after a link went down, it may still be why ranks fail: PyTorch's longest time limit is 30 minutes."""
TAIL_LINES = 200
HINTS = ("xid", "pids")
"""A cause of these kinds that is the program's own only adds a hint to what the launcher says."""


@dataclass(frozen=True)
class Cause:
    """Something that a host saw.

    Attributes:
        at_s: when, on the head's monotonic clock, seconds.
        blame: as in `gpurun.doctor.findings.Xid`.
        fatal: the attempt cannot continue.
        evidence: what the host saw, word for word.
        advice: the manufacturer's advice, if there is any.
    """

    at_s: float
    host: str
    kind: Kind
    text: str
    evidence: str
    blame: Blame
    fatal: bool = False
    gpu: int | None = None
    rank: int | None = None
    advice: str = ""

    @property
    def reason(self) -> str:
        """Return one sentence with rank, host, cause and advice."""
        gpu = "" if self.gpu is None else f"GPU {self.gpu}: "
        rank = "" if self.rank is None else f" (rank {self.rank})"
        advice = f"; NVIDIA advises: {self.advice}" if self.advice else ""
        return f"{self.host}: {gpu}{self.text}{rank}{advice}"


def rank_of(grants: Sequence[Grant], host: str, gpu: int) -> int | None:
    """Return the rank that has a GPU; None if the gang does not have it."""
    rank = 0
    for grant in grants:
        for mine in grant.gpus:
            if (grant.host, mine) == (host, gpu):
                return rank
            rank += 1
    return None


def cause_of(
    item: Mapping[str, Any], host: str, grants: Sequence[Grant], containers: Iterable[str], now_s: float
) -> Cause | None:
    """Return the cause in a report of `gpurun.node.job.watch` on a host, if it concerns the gang.

    Args:
        containers: ids of the gang's containers on that host.
        now_s: the head's monotonic clock.
    """
    at_s = now_s - float(item.get("age_s", 0.0))
    gpu = item.get("gpu")
    rank = None if gpu is None else rank_of(grants, host, gpu)
    match item["kind"]:
        case "kernel":
            return _of_line(item, host, grants, containers, at_s)
        case "xid":
            return _xid(at_s, host, int(item["xid"]), f"NVML reports Xid {item['xid']} on GPU {gpu}", gpu, rank)
        case "lost":
            return Cause(
                at_s, host, "gpu-lost", f"the GPU is lost: {item['text']}", item["text"], "hardware", True, gpu, rank
            )
        case "ecc":
            errors = count(item["count"] - item["before"], "uncorrectable memory error")
            text = f"the GPU had {errors} since the attempt began"
            said = f"uncorrected volatile ECC errors of GPU {gpu}: {item['before']} → {item['count']}"
            return Cause(at_s, host, "ecc", text, said, "hardware", True, gpu, rank)
        case "disk" | "memory" | "pids" | "filled" | "link":
            return _of_use(item, host, at_s)
    return None


def _link(at_s: float, host: str, device: str, said: str) -> Cause:
    return Cause(at_s, host, "link", f"the network link of {device} went down", said, "host")


def _of_use(item: Mapping[str, Any], host: str, at_s: float) -> Cause:
    """Return the cause in what a host counted of the gang's own container, or saw of its disks and links."""
    if item["kind"] == "link":
        return _link(at_s, host, item["device"], f"{item['device']}: ACTIVE → {item['state']}")
    if item["kind"] == "disk":
        said = f"{item['free_bytes'] >> 20} MiB free at {item['path']}"
        return Cause(at_s, host, "disk-full", f"{item['what']} is full", said, "host")
    if item["kind"] == "memory":
        had, used = item["limit_bytes"], item["peak_bytes"]
        said = f"oom_kill {item['kills']}, memory.max {had}, memory.peak {used}"
        if item["is_own_limit"] and had:
            return Cause(at_s, host, "oom", _out_of_own_memory(had, used), said, "program")
        return Cause(
            at_s, host, "oom", "the host ran out of memory, so the kernel killed a process of the job", said, "host"
        )
    if item["kind"] == "pids":
        text = f"the job has reached its limit of {item['most']} processes and threads on this host"
        return Cause(at_s, host, "pids", text, f"pids.events: max {item['refused']}", "program")
    text = (
        f"the job filled {item['what']} with {_gib(item['written_bytes'])}, so gpurun ended the job before other jobs "
        "failed. Let the job write less, or write to a mount on a larger disk"
    )
    said = f"{item['free_bytes'] >> 20} MiB free at {item['path']}"
    return Cause(at_s, host, "disk-full", text, said, "program", fatal=True)


def _out_of_own_memory(had_bytes: int, used_bytes: int | None) -> str:
    more_mib = 2 * (had_bytes >> 20)
    return (
        f"out of memory: the job had {_gib(had_bytes)} on this host and used {_gib(used_bytes or had_bytes)}, so the "
        f"kernel killed a process of the job; ask for more memory with --memory {more_mib}MiB (`memory:` in a recipe), "
        "or for more GPUs"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB" if size_bytes >= 1 << 30 else f"{size_bytes >> 20} MiB"


def _of_line(
    item: Mapping[str, Any], host: str, grants: Sequence[Grant], containers: Iterable[str], at_s: float
) -> Cause | None:
    line, said = parse_kernel_line(item["line"]), item["line"]
    if isinstance(line, LinkLine):
        return _link(at_s, host, line.device, said)
    if isinstance(line, XidLine):
        for index, bus in item["cards"].items():
            if same_gpu(line.pci, bus):
                gpu = int(index)
                rank = rank_of(grants, host, gpu)
                return None if rank is None else _xid(at_s, host, line.number, said, gpu, rank)
    if isinstance(line, OomLine) and (item["rank"] is not None or line.container in set(containers)):
        memory = item.get("memory") or {}
        is_own = line.limit and memory.get("is_own_limit", True)  # else the limit of a group of containers
        text = f"the {'job' if is_own else 'host'} ran out of memory, so the kernel killed process {line.pid}"
        if is_own and memory.get("limit_bytes"):
            text = _out_of_own_memory(memory["limit_bytes"], memory["peak_bytes"])
        return Cause(at_s, host, "oom", text, said, "program" if is_own else "host", rank=item["rank"])
    return None


def _xid(at_s: float, host: str, number: int, said: str, gpu: int | None, rank: int | None) -> Cause:
    meant = xid(number)
    text = f"Xid {number}: {meant.meaning}"
    return Cause(at_s, host, "xid", text, said, meant.blame, meant.fatal, gpu, rank, meant.advice)


def first_cause(
    causes: Iterable[Cause], lines: Sequence[str], own: Sequence[str] = (), *, now_s: float = 0.0, hangs: bool = False
) -> Cause | None:
    """Return the earliest cause that explains a failed attempt.

    Hardware and memory explain a failure by themselves; a full disk only if a rank complained about it. A program's own
    Xid is the cause only if there is no other, because the driver also logs such Xids after other failures. A link that
    went down is the cause only if the rank that failed first lost its connections, or the gang hangs.

    Args:
        lines: the last lines that the gang printed.
        own: the last lines of the rank that failed first; of all ranks, if that is not known.
        now_s: the head's monotonic clock.
        hangs: the gang hangs.
    """
    causes = tuple(causes)
    complained = any(word in line for line in lines[-TAIL_LINES:] for word in _NO_SPACE)
    explain = [
        cause
        for cause in causes
        if cause.kind == "oom" or cause.blame == "hardware" or cause.fatal or (cause.kind == "disk-full" and complained)
    ]
    is_cut = hangs or any(_NETWORK.search(line[:MOST_LETTERS]) for line in own[-TAIL_LINES:])
    links = [cause for cause in causes if cause.kind == "link" and is_cut and now_s - cause.at_s <= LINK_S]
    others = [cause for cause in causes if cause.kind in HINTS]
    return min(explain or links or others, key=lambda cause: cause.at_s, default=None)


def end_of(cause: Cause) -> End:
    """Return how an attempt ends because of a cause, while its ranks may still run."""
    failure = FirstFailure(
        reason=cause.reason, rank=cause.rank, host=cause.host, kind=cause.kind, evidence=cause.evidence,
        cordon=cause.blame == "hardware",
    )  # fmt: skip
    suspects = (cause.host,) if cause.blame in ("hardware", "host") else ()
    return End(State.FAILED, cause.reason, 4 if suspects else 1, failure=failure, ladder=True, suspects=suspects)


def explained(end: End, cause: Cause | None) -> End:
    """Add the cause, if a host saw one, to the end of an attempt that the launcher or a container has ended.

    A program's own Xid only adds a hint to the launcher's message.
    """
    if cause is None or end.outcome is not State.FAILED:
        return end
    if end.failure is not None and cause.blame in ("program", "unclear") and cause.kind in HINTS:
        reason = f"{end.reason} ({cause.reason})"
        return replace(end, reason=reason, failure=replace(end.failure, kind=cause.kind, evidence=cause.evidence))
    before = end.failure or FirstFailure(end.reason)
    if cause.rank is None and before.host == cause.host:
        cause = replace(cause, rank=before.rank)
    by_cause = end_of(cause)
    assert by_cause.failure is not None
    is_whole = cause.kind == "oom" or cause.blame == "program"
    failure = replace(by_cause.failure, exit_code=before.exit_code, excerpt=before.excerpt)
    return replace(
        end, reason=by_cause.reason, code=by_cause.code, failure=failure,
        suspects=by_cause.suspects if is_whole else tuple(sorted({*end.suspects, *by_cause.suspects})),
    )  # fmt: skip


# Say what to do about a failed rank, from what it printed last: one table of what programs say, and of its cure.
# Pure.


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


# Decide what follows an attempt whose containers did not run: another placement, or the job's end. Pure.


Looks = Mapping[str, object | None]
"""Host that was checked → why it is out (`gpurun.state.hosts.Out`); None = nothing is wrong with it."""

BEFORE_RUNNING = frozenset({State.QUEUED, State.GRANTED, State.PREPARING, State.STARTING})
ENOUGH_HOSTS = 3
"""If so many sound hosts fail in the same way, the job is at fault."""
ENOUGH_TIMES = 2
"""If fewer hosts could hold the gang, all of them fail in the same way, in all at least so often."""
LASTS_S = 60.0
"""So long after the first failure the same cause still fails attempts: it does not pass by itself."""
FREE_PLACEMENTS = 3
"""So many placements on hosts that are new to the job follow each other at once; later ones after a pause."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
FLAPPING_S = 120.0
FLAPPING_PAUSE_S = 60.0
"""If a host was out, returned and fails again within `FLAPPING_S`, the pauses double from 5 s to this."""
FIRST_AVOID_S = 60.0
LONGEST_AVOID_S = 600.0
FORGET_S = 6 * 3600.0
MOST_FAILURES = 64
MOST_WORDS = 200

MAY_BE_THE_JOBS = frozenset({"architecture", "no-command", "no-mount", "docker", "load-failed", "not-verified"})
"""Kinds of failures that a job can bring about. Any other is a host's, the site's or the head's: the job waits."""
CERTAIN = frozenset({"architecture", "no-command", "no-mount"})
"""Kinds of failures that do not pass by themselves: they need not last. Each host says what it, or the image, lacks."""
SAID_BY_KIND = frozenset({"architecture", "no-command"})
"""Kinds of failures that are the same whatever the host's words are."""

_JOB = re.compile(r"\bj-[0-9a-f]{8}\b")
_PATH = re.compile(r"(?<![\w/])~?/[^\s'\":,;()]*")
_DIGEST = re.compile(r"\b[0-9a-f]{7,}\b")
_ADDRESS = re.compile(r"\b[0-9a-f]*(?::[0-9a-f]*){2,}")
_QUOTED = re.compile(r"\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)|`[^`]*`")
_TIME = re.compile(r"\b\d{4}[-/]\d\d[-/]\d\d(?:[t ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?\s?(?:z|utc|[+-]\d\d:?\d\d)?)?(?!\w)")
_DURATION = re.compile(r"\b(?:\d+(?:\.\d+)?(?:h|m|s|ms|us|µs|ns))+\b")
_NUMBER = re.compile(r"\d[\d.]*(?:\s*(?:[kmgtp]i?)?b(?:ytes?)?\b)?")
NORMAL = (
    (_JOB, "JOB"), (_QUOTED, "QUOTED"), (_PATH, "PATH"), (_TIME, "TIME"), (_DIGEST, "DIGEST"), (_ADDRESS, "ADDRESS"),
    (_DURATION, "N"), (_NUMBER, "N"),
)  # fmt: skip


@dataclass(frozen=True)
class Next:
    """What follows.

    Attributes:
        end: the end of the attempt.
        failures, placements: for the job's record.
    """

    end: End
    failures: tuple[StartFailure, ...]
    placements: int


def is_unstarted(state: State, end: End) -> bool:
    """Return whether an attempt ended by failures of hosts, or of the head, before its gang ran."""
    return state in BEFORE_RUNNING and end.outcome is State.FAILED and bool(end.by_host)


def after(
    record: JobRecord, end: End, looks: Looks, able: Collection[str], *, hosts: Collection[str],
    now_s: float,
) -> Next:  # fmt: skip
    """Return what follows an attempt for which `is_unstarted` is true.

    Args:
        looks: the checks of the failed hosts.
        able: the hosts that could hold the gang now, or a part of it.
        hosts: names that may occur in the failures: the gang's hosts.
        now_s: the head's clock, seconds since the epoch.
    """
    before = {each.host: each for each in record.start_failures if abs(now_s - each.at_s) < FORGET_S}
    new = [
        _failure(record.attempt, host, error, looks, before.get(host), hosts=hosts, now_s=now_s)
        for host, error in sorted(end.by_host.items())
        if host
    ]
    known = {**before, **{each.host: each for each in new}}
    failures = tuple(sorted(known.values(), key=lambda each: (each.at_s, each.host))[-MOST_FAILURES:])
    placements = record.placements + 1
    for each in new:
        alike = [other for other in failures if _counts(other) and is_same(each, other)]
        if _counts(each) and _is_the_jobs(alike, able):
            return Next(_the_jobs(end, each, alike), failures, placements)
    pause_s = _pause_s(new, before, looks, placements, now_s)
    again = Restart(now_s + pause_s, attempt=0, of=None) if pause_s else None
    reason = end.reason if again else f"{end.reason}; gpurun looks for other hosts"
    return Next(replace(end, outcome=State.QUEUED, reason=reason, suspects=(), restart=again), failures, placements)


def _failure(
    attempt: int, host: str, error: HostFailure, looks: Looks, before: StartFailure | None, *,
    hosts: Collection[str], now_s: float,
) -> StartFailure:  # fmt: skip
    is_out = looks.get(host) is not None
    words, reason = normalised(error.message, {host, *hosts}), " ".join(error.message.split())[:MOST_WORDS]
    found = StartFailure(
        host, attempt, error.kind, words, reason, now_s, now_s,
        is_sound=host in looks and not is_out, lacks_mib=error.lacks_mib if isinstance(error, NoRoom) else 0,
    )  # fmt: skip
    times, first_s = 1, now_s
    if before is not None and is_same(before, found):
        times = before.times + 1
        first_s = before.since_s if before.is_sound and found.is_sound else now_s
    avoid_s = 0.0 if is_out else min(FIRST_AVOID_S * 2.0 ** min(times - 1, 30), LONGEST_AVOID_S)
    return replace(found, times=times, until_s=now_s + avoid_s, first_s=first_s)


def is_same(one: StartFailure, other: StartFailure) -> bool:
    """Return whether two failures have the same cause."""
    return one.kind == other.kind and (one.kind in SAID_BY_KIND or one.words == other.words)


def normalised(message: str, hosts: Collection[str]) -> str:
    """Return a message without what differs between hosts and attempts: names of hosts and jobs, quoted text, paths,
    times, durations, digests, addresses, numbers with their units.
    """
    text = message[: 10 * MOST_WORDS].lower()
    for host in sorted(hosts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(host.lower())}(?![\w-])", "HOST", text)
    for pattern, name in NORMAL:
        text = pattern.sub(name, text)
    return " ".join(text.split())[:MOST_WORDS]


def _counts(failure: StartFailure) -> bool:
    return failure.is_sound and failure.kind in MAY_BE_THE_JOBS


def _is_the_jobs(alike: Sequence[StartFailure], able: Collection[str]) -> bool:
    hosts, times = {each.host for each in alike}, sum(each.times for each in alike)
    kind = alike[0].kind
    is_everywhere = bool(able) and hosts.issuperset(able) and times >= ENOUGH_TIMES
    if kind == "no-command":  # the launcher's host starts last: while others fail, it never says it
        is_everywhere |= bool(able) and times >= ENOUGH_HOSTS
    lasts = max(each.at_s for each in alike) - min(each.since_s for each in alike) >= LASTS_S
    return (len(hosts) >= ENOUGH_HOSTS or is_everywhere) and (lasts or kind in CERTAIN)


def _the_jobs(end: End, failure: StartFailure, alike: Sequence[StartFailure]) -> End:
    error = end.by_host[failure.host]
    names = sorted(each.host for each in alike)
    named = ", ".join(names[:ENOUGH_HOSTS]) + (f" and {len(names) - ENOUGH_HOSTS} more" if len(names) > 3 else "")
    hint = f" ({error.hint})" if error.hint else ""
    reason = (
        f"{named}: {error.message}{hint}; a check finds no fault on {'these hosts' if len(names) > 1 else 'this host'}"
    )
    first = FirstFailure(reason=error.message, host=failure.host, kind="")
    return replace(end, reason=reason, code=error.exit_code, failure=first, suspects=())


def _pause_s(
    new: Sequence[StartFailure], before: Mapping[str, StartFailure], looks: Looks, placements: int,
    now_s: float,
) -> float:  # fmt: skip
    """Return the wait before the next placement; 0 = none.

    The scheduler keeps all jobs off hosts that are out. Other hosts may fail again: the waits double, so a job that
    can start nowhere is placed every five minutes.
    """
    if new and all(looks.get(each.host) is not None for each in new):
        again = [each.times for each in new if each.host in before and now_s - before[each.host].at_s < FLAPPING_S]
        return min(FIRST_PAUSE_S * 2.0 ** min(max(again) - 1, 30), FLAPPING_PAUSE_S) if again else 0.0
    is_new = bool(new) and all(each.host not in before for each in new)
    if is_new and placements <= FREE_PLACEMENTS:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** min(max(placements - 2, 0), 30), LONGEST_PAUSE_S)


def able_hosts(inventory: Inventory, spec: JobSpec, unusable: Collection[str]) -> frozenset[str]:
    """Return the hosts that could hold a gang now, or a part of it, whatever runs there."""
    asked = spec.constraints
    least = asked.gpus_per_host or (spec.min_gpus or spec.gpus if asked.locality == "host" else 1)
    return frozenset(
        host.name
        for host in inventory.hosts
        if host.name not in unusable
        and host.name not in asked.avoid
        and (not asked.hosts or host.name in asked.hosts)
        and host.gpus >= least
        and serves((host.generation, host.gpu_model, host.gpu_memory_mib), asked)
    )
