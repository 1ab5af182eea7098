"""Where the ranks of a job on this host stand while their gang hangs, from three sources that need no program's help.

- **Python's stacks.** `gpurun.runtime.sitecustomize` has Python print them to a file when a signal comes. This needs no
  debugger, which Yama allows to ancestors only.
- **PyTorch's flight recorder.** Each rank that uses NCCL has made a pipe; who writes to it gets the last collectives of
  the rank in a file, also while it hangs.
- **NCCL RAS.** One process of the gang on each host answers for all ranks (NCCL user guide, "RAS").

All of this is written by programs in a container, so nothing of it is run, and each source is limited in size and in
time. The recorder's file is a pickle: `read_pickle` knows dictionaries, lists, texts and numbers, and refuses the rest.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import select
import socket
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from gpurun.node.agent.frames import Call
from gpurun.node.agent.processes import Process, environment_of, is_same, open_files
from gpurun.node.job import parts, rank_processes
from gpurun.node.job.rank_processes import RankProcess
from gpurun.node.job.ranks import LISTEN, rows

# Python's stacks.


SIGNAL = 57
"""`gpurun.runtime.sitecustomize` has the same number, and the same name of the file."""
STACKS = "stacks"
MOST_PROCESSES = 128
"""So many processes of one host are asked for their stacks."""
MOST_STACK_BYTES = 1 << 18
MOST_FRAMES = 40
MOST_TEXT = 300
"""No more characters of a file's or a function's name are read."""
PRINTED_S = 1.5
"""A process that has not printed its stacks after so long waits in the kernel, for a disk for example."""
_STEP_S = 0.02
_STARTS_CHILDREN = {
    "torch/multiprocessing/spawn.py": ("join",),
    "multiprocessing/process.py": ("join",),
    "/subprocess.py": ("wait", "communicate"),
}
"""Functions that wait for processes, by the file they are in; a program waits for its data loaders elsewhere."""
_THREAD = re.compile(r"(Stack|Current thread|Thread)(?: 0x[0-9a-f]+.*)? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')


class _Signalled(NamedTuple):
    """A process that prints its stacks, its rank's file of stacks, and where the file ended before."""

    one: RankProcess
    path: str
    size: int


def stacks(call: Call, job: str, attempt: int, gently: bool = False) -> List[Dict[str, Any]]:
    """Return where each rank's Python processes stand.

    Of a rank that starts others, such as ``accelerate launch`` or ``torch.multiprocessing.spawn``, those count.

    Args:
        gently: ask only processes whose main thread rests: `RESTS_S` says why.

    Returns:
        ``[{"rank", "inner", "pid", "frames", "threads", "state"}]``: `inner` is the number that a launcher inside the
        rank gave to the process, None if none did; `frames` are those of the main thread, the innermost first, as
        ``[file, line, function]``, none if the process did not print them; `threads` is how many threads there are;
        `state` that of the process (man proc_pid_stat), D if it waits in the kernel.
    """
    able = {
        one.process.pid: one
        for one in rank_processes.of_job(job, attempt)
        if rank_processes.MARK in one.environ and _catches(one.process)
    }
    chosen, copies = _choose(able)
    resting = _resting(call, able) if gently else set(able)
    busy = [_stack(one, "") for one in chosen if one.process.pid not in resting]
    found = busy + _in_turn(call, job, [one for one in chosen if one.process.pid in resting])
    waiting = {told["pid"] for told in found if _waits_for_children(told["frames"])}
    below = [able[pid] for pid, above in copies.items() if above in waiting and pid in resting]
    children = _in_turn(call, job, below)
    return children + [told for told in found if told["pid"] not in {copies[child["pid"]] for child in children}]


def _choose(able: Dict[int, RankProcess]) -> Tuple[List[RankProcess], Dict[int, int]]:
    """Return the processes whose stacks tell something, and the others, such as data loaders, with their parents.

    A process that only started others of their own number is none of them.
    """
    numbers = {pid: _inner(pid) for pid in able}
    starters: Set[int] = set()
    copies: Dict[int, int] = {}
    for pid, one in able.items():
        above = one.process.parent
        if above not in able:
            continue
        if numbers[above] == numbers[pid]:
            copies[pid] = above
        else:
            starters.add(above)
    return [one for pid, one in sorted(able.items()) if pid not in starters and pid not in copies], copies


RESTS_S = 0.1
"""A main thread rests if it used no processor for so long. CPython 3.12 and 3.13 crash when this signal interrupts a
running main thread, about once in 2,500 times; nothing of it was seen where the thread waits."""


def _resting(call: Call, able: Dict[int, RankProcess]) -> Set[int]:
    before = {pid: _ran_ns(pid) for pid in able}
    call.wait(RESTS_S)
    return {pid for pid, ran_ns in before.items() if ran_ns is not None and _ran_ns(pid) == ran_ns}


def _ran_ns(pid: int) -> Optional[int]:
    """Return how long a process's main thread has used a processor; None if the kernel does not say (schedstat)."""
    try:
        with open("/proc/%d/task/%d/schedstat" % (pid, pid), "rb") as stream:
            return int(stream.read(100).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _waits_for_children(frames: List[List[Any]]) -> bool:
    return any(
        file.endswith(ending) and function in functions
        for file, _, function in frames
        for ending, functions in _STARTS_CHILDREN.items()
    )


def _in_turn(call: Call, job: str, waiting: List[RankProcess]) -> List[Dict[str, Any]]:
    """Return the stacks of processes. Asks one of each file at a time: the stacks do not say whose they are."""
    found: List[Dict[str, Any]] = []
    waiting = waiting[:MOST_PROCESSES]
    while waiting:
        now: Dict[str, RankProcess] = {}
        for one in waiting:
            now.setdefault(_file(job, one), one)
        waiting = [one for one in waiting if one not in now.values()]
        found += _printed(call, [each for each in (_ask(path, one) for path, one in now.items()) if each is not None])
    return found


def _inner(pid: int) -> Optional[int]:
    """Return the number that a launcher inside the rank gave to a process."""
    text = (environment_of(pid) or {}).get("RANK", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else None


def _catches(process: Process) -> bool:
    """Return whether a process has a handler for the signal. It would end any other.

    A program whose main thread blocks the signal may wait for all signals elsewhere (``sigwait``), and take this one
    for its own.
    """
    if not _has_signal(process, b"SigCgt:"):
        return False
    for _ in range(5):  # a process that still prints the last time blocks it for a moment
        if not _has_signal(process, b"SigBlk:"):
            return True
        time.sleep(0.01)
    return False


def _has_signal(process: Process, mask: bytes) -> bool:
    """Return whether the signal is in one of the masks in ``/proc/PID/status``."""
    try:
        with open("/proc/%d/status" % process.pid, "rb") as stream:
            masks = [line.split()[1] for line in stream if line.startswith(mask)]
        return bool(masks) and bool(int(masks[0], 16) >> (SIGNAL - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def _file(job: str, one: RankProcess) -> str:
    """Return the path of a process's file of stacks. Its environment says which: it is checked, as a rank's name."""
    _, _, rest = one.environ[rank_processes.MARK].partition("/")
    attempt, _, name = rest.partition("/")
    if not attempt.isdigit() or rank_processes.parse_rank_folder(name) is None:
        return ""
    return os.path.join(rank_processes.run_folder(job), "ranks", attempt, name, STACKS)


def _ask(path: str, one: RankProcess) -> Optional[_Signalled]:
    """Send the signal to a process that prints into this file. None for one that has closed the file: the number of its
    descriptor may be another file's now.
    """
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or not _has_open(one.process.pid, found):
            return None
        if not is_same(one.process) or not _catches(one.process):
            return None
        if not _has_signal(one.process, b"ShdPnd:"):  # one that is stopped for days would get thousands at once
            os.kill(one.process.pid, SIGNAL)
    except OSError:
        return None
    return _Signalled(one, path, found.st_size)


def _has_open(pid: int, file: os.stat_result) -> bool:
    for descriptor in open_files(pid):
        try:
            found = os.stat("/proc/%d/fd/%d" % (pid, descriptor))
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino):
            return True
    return False


def _printed(call: Call, asked: List[_Signalled]) -> List[Dict[str, Any]]:
    """Wait until all have printed, or for `PRINTED_S`; return what they printed."""
    deadline = time.monotonic() + PRINTED_S
    texts: Dict[str, bytes] = {}
    while True:
        done = True
        for each in asked:
            text = _tail(each.path, each.size)
            done = done and bool(text) and text == texts.get(each.path) and text.endswith(b"\n")
            texts[each.path] = text
        if done or time.monotonic() >= deadline:
            break
        call.wait(_STEP_S)
    return [_stack(each.one, texts[each.path].decode("utf-8", "replace")) for each in asked]


def _tail(path: str, offset: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, MOST_STACK_BYTES, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _stack(one: RankProcess, text: str) -> Dict[str, Any]:
    frames, threads = read_stacks(text)
    return {
        "rank": one.rank,
        "inner": _inner(one.process.pid),
        "pid": one.process.pid,
        "frames": frames,
        "threads": threads,
        "state": _state(one.process.pid),
    }


def read_stacks(text: str) -> Tuple[List[List[Any]], int]:
    """Return the frames of the thread that got the signal, innermost first, and how many threads printed any. Pure.

    The kernel gives a process's signal to its main thread. The format is that of Python's ``faulthandler``.
    """
    frames: List[List[Any]] = []
    threads, is_current = 0, False
    for line in text.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            threads += 1
            is_current = thread.group(1) != "Thread" and not frames
            continue
        frame = _FRAME.match(line)
        if frame is not None and is_current and len(frames) < MOST_FRAMES:
            file, number, function = frame.groups()
            frames.append([file[-MOST_TEXT:], int(number), function[:MOST_TEXT]])
    return frames, threads


def _state(pid: int) -> str:
    """Return the state of a process's main thread, a letter; "" if it is gone."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            return stream.read(4096).rpartition(b")")[2].split()[0].decode("ascii", "replace")[:1]
    except (OSError, IndexError):
        return ""


# PyTorch's flight recorder.


RECORDER = "recorder.%d"
"""`gpurun.runtime.sitecustomize` has the same name."""
MOST_DUMP_BYTES = 16 << 20
DUMPED_S = 5.0
"""PyTorch looks at the pipe once a second, or more rarely, and then writes the file."""
MOST_PIPES = 256
MOST_ITEMS = 1_000_000
MOST_KEY = 1 << 60
"""Larger numbers can have equal hashes: a dictionary of 300 000 such keys takes half an hour, with no other thread."""
MOST_GROUPS = 64
_PIPE = re.compile(r"pipe_(0|[1-9]\d{0,6})\.pipe\Z", re.ASCII)


def recorder(call: Call, job: str, attempt: int) -> List[Dict[str, Any]]:
    """Return the last collective of each rank in each of its process groups, from the files that PyTorch writes now.

    Returns:
        ``[{"rank", "groups": [{"group", "done", "entered", "name", "state", "frames"}], "problem"}]``: the ranks of
        `torch.distributed`. `entered` counts the collectives that the rank has called; `name`, `state` and `frames` are
        those of the last one; `done` is the last one that ended. `problem` says why a file was not read.
    """
    folder = os.path.join(rank_processes.run_folder(job), RECORDER % int(attempt))
    ranks = sorted(int(found.group(1)) for found in map(_PIPE.match, _names(folder)) if found)[:MOST_PIPES]
    before = {rank: _version(os.path.join(folder, "dump_%d" % rank)) for rank in ranks}
    waiting = {rank for rank in ranks if _poke(os.path.join(folder, "pipe_%d.pipe" % rank))}
    found: List[Dict[str, Any]] = []
    deadline = time.monotonic() + DUMPED_S
    sizes: Dict[int, Any] = {}
    while waiting and time.monotonic() < deadline:
        call.wait(0.1)
        for rank in sorted(waiting):
            if time.monotonic() > deadline:
                break  # a hostile file takes a second, and there may be hundreds
            path = os.path.join(folder, "dump_%d" % rank)
            version = _version(path)
            if version is not None and version != before[rank] and version == sizes.get(rank):
                told = _dump(path)
                if told["problem"] != CUT or time.monotonic() > deadline - 0.5:
                    found.append({"rank": rank, **told})
                    waiting.discard(rank)
            sizes[rank] = version
    return found


def _names(folder: str) -> List[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for _, entry in zip(range(4 * MOST_PIPES), entries)]
    except OSError:
        return []


def _version(path: str) -> Optional[Tuple[int, int, int]]:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _poke(path: str) -> bool:
    """Ask for a rank's file. A pipe that nobody reads any more, or that is something else, is left alone."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode) and os.write(descriptor, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


CUT = "the file is cut off"


def _dump(path: str) -> Dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {"groups": [], "problem": "it is no regular file"}
            data = stream.read(MOST_DUMP_BYTES + 1)
    except OSError as error:
        return {"groups": [], "problem": error.strerror or "it cannot be read"}
    if len(data) > MOST_DUMP_BYTES:
        return {"groups": [], "problem": "it has more than %d MiB" % (MOST_DUMP_BYTES >> 20)}
    try:
        return {"groups": last_collectives(read_pickle(data)), "problem": ""}
    except PickleRefused as error:
        return {"groups": [], "problem": str(error)}


def last_collectives(dump: Any) -> List[Dict[str, Any]]:
    """Return the last collective of each process group in a dump of the flight recorder (its version 2). Pure.

    The dump's ``entries`` are the events of the rank, the oldest first. Sends and receives do not count: each pair of
    ranks has its own.
    """
    entries = dump.get("entries") if isinstance(dump, dict) else None
    found: Dict[str, Dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("is_p2p") is True:
            continue
        number, state = entry.get("collective_seq_id"), entry.get("state")
        if type(number) is not int or not 0 <= number < 1 << 40 or not isinstance(state, str):
            continue
        group = _group(entry.get("process_group"))
        last = found.get(group)
        if last is None and len(found) >= MOST_GROUPS:
            continue
        done = number if state == "completed" else 0
        found[group] = {
            "group": group,
            "entered": number,
            "done": max(done, last["done"] if last else 0),
            "name": _short(entry.get("profiling_name")),
            "state": state[:MOST_TEXT],
            "frames": _frames(entry.get("frames")),
        }
    return [found[group] for group in sorted(found)]


def _group(told: Any) -> str:
    """Return the name of a process group: PyTorch tells its name, a number or a hash, and its description.

    Both count: Megatron-LM and `DeviceMesh` give one description to all groups of a kind, each with other ranks.
    """
    words = [each for each in told if isinstance(each, str)] if isinstance(told, list) else []
    described = words[1] if len(words) > 1 and words[1] != "undefined" else ""
    return (described if described == "default_pg" else " ".join([described, *words[:1]]).strip())[:MOST_TEXT]


def _short(value: Any) -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else ""


def _frames(told: Any) -> List[List[Any]]:
    found = []
    for frame in told[:MOST_FRAMES] if isinstance(told, list) else ():
        file, line = (frame.get("filename"), frame.get("line")) if isinstance(frame, dict) else (None, None)
        if isinstance(file, str) and type(line) is int and 0 <= line < 10**9:
            found.append([file[-MOST_TEXT:], line, _short(frame.get("name"))])
    return found


class PickleRefused(ValueError):
    """A pickle has something that is no plain value, or more than is read."""


_MARK = object()
_OPCODES = {each.code: each for each in pickletools.opcodes}
_PLAIN = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip


def read_pickle(data: bytes) -> Any:
    """Return the value of a pickle that consists of dictionaries, lists, tuples (as lists), texts and numbers. Pure.

    Python's own unpickler can be kept from importing, but not from using the memory that a short pickle asks for.

    Raises:
        PickleRefused: with the reason.
    """
    machine = _Machine()
    stream = io.BytesIO(data)
    try:
        for number, code in enumerate(iter(lambda: stream.read(1), b"")):
            if number > MOST_ITEMS:
                raise PickleRefused("it has more than %d items" % MOST_ITEMS)
            opcode = _OPCODES[code.decode("latin-1")]
            if opcode.name == "STOP":
                return machine.stack[-1]
            carry_out = machine.opcodes.get(opcode.name)
            if carry_out is None:  # its argument is not even read: a decimal number of a million digits takes minutes
                raise PickleRefused("it is no plain value: it has the opcode %s" % opcode.name)
            carry_out(None if opcode.arg is None else opcode.arg.reader(stream))
    except PickleRefused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError):
        raise PickleRefused(CUT) from None
    raise PickleRefused(CUT)


class _Machine:
    """The stack and the memo of a pickle, and the few opcodes that plain values need (Python's ``pickletools``)."""

    def __init__(self) -> None:
        self.stack: List[Any] = []
        self._memo: Dict[int, Any] = {}
        push = self.stack.append
        self.opcodes: Dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(_PLAIN, push),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: push(_MARK),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push([]),
            "TUPLE": lambda _: push(self._above_mark()),
            "TUPLE1": lambda _: push(self._last(1)),
            "TUPLE2": lambda _: push(self._last(2)),
            "TUPLE3": lambda _: push(self._last(3)),
            "BINPUT": self._keep,
            "LONG_BINPUT": self._keep,
            "MEMOIZE": lambda _: self._keep(len(self._memo)),
            "BINGET": lambda number: push(self._memo[number]),
            "LONG_BINGET": lambda number: push(self._memo[number]),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._above_mark()),
            "SETITEM": lambda _: self._set(self._last(2)),
            "SETITEMS": lambda _: self._set(self._above_mark()),
        }

    def _keep(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def _last(self, count: int) -> List[Any]:
        if len(self.stack) < count:
            raise IndexError
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _above_mark(self) -> List[Any]:
        items: List[Any] = []
        while self.stack[-1] is not _MARK:
            items.append(self.stack.pop())
        self.stack.pop()
        return items[::-1]

    def _extend(self, items: List[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError
        self.stack[-1].extend(items)

    def _set(self, items: List[Any]) -> None:
        into = self.stack[-1]
        if not isinstance(into, dict):
            raise TypeError
        for key in items[::2]:
            if not (isinstance(key, str) or (type(key) is int and abs(key) < MOST_KEY)):
                raise PickleRefused("it is no plain value: it has a key that is neither a text nor a number")
        into.update(zip(items[::2], items[1::2]))


# NCCL RAS.


RAS_S = 3.0
MOST_RAS_BYTES = 1 << 16
_HELLO = b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n"


def ras(job: str, attempt: int, port: int) -> str:
    """Return what NCCL says of the whole gang; "" if nothing of this job listens on the port."""
    if not _is_own(job, attempt, port):
        return ""
    data = bytearray()
    deadline = time.monotonic() + RAS_S
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=RAS_S) as connection:
            connection.sendall(_HELLO)
            connection.setblocking(False)
            while len(data) < MOST_RAS_BYTES:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not select.select([connection], [], [], left_s)[0]:
                    break
                read = connection.recv(1 << 14)
                if not read:
                    break
                data += read
    except OSError:
        pass
    return bytes(data[:MOST_RAS_BYTES]).decode("utf-8", "replace")


def _is_own(job: str, attempt: int, port: int) -> bool:
    """Return whether the process that listens there is of this job: any process of the host could."""
    inodes = {row.inode for row in rows("self") if row.state == LISTEN and row.local[1] == port}
    if not inodes:
        return False
    return any(
        path[8:-1] in inodes
        for one in rank_processes.of_job(job, attempt)
        for path in open_files(one.process.pid).values()
        if path.startswith("socket:[")
    )


# All of it; and when something was last written.


MOST_FILES = 20_000
MOST_WALK_S = 3.0
_walking: Set[str] = set()
"""Jobs whose outputs are being looked at: a walk that waits for a broken disk stays, and no second one joins it."""


def look(call: Call, job: str, attempt: int, port: int, gently: bool = False) -> Dict[str, Any]:
    """Return where the job's ranks on this host stand.

    Args:
        port: of NCCL RAS; 0 = unknown.
        gently: as in `stacks`.

    Returns:
        ``{"stacks", "recorder", "ras"}``, as the functions above say.
    """
    told = stacks(call, job, attempt, gently)
    return {"stacks": told, "recorder": recorder(call, job, attempt), "ras": ras(job, attempt, port) if port else ""}


def written(call: Call, job: str) -> Dict[str, Optional[float]]:
    """Return ``{"age_s"}``: how long ago a file of the outputs was last written; None if there are none, or if an
    earlier look still waits for their disk.

    A time in the future counts as now.
    """
    if job in _walking:
        return {"age_s": None}
    _walking.add(job)
    try:
        newest = max(_times(parts.outputs_folder(job)), default=None)
    finally:
        _walking.discard(job)
    return {"age_s": None if newest is None else max(0.0, time.time() - newest)}


def _times(folder: str) -> Iterator[float]:
    folders, seen, deadline = [folder], 0, time.monotonic() + MOST_WALK_S
    while folders and time.monotonic() < deadline:
        try:
            folder = folders.pop()
            yield os.stat(folder).st_mtime  # of a new file in it, which may be one too many to look at
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MOST_FILES or time.monotonic() > deadline:
                        return
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            yield entry.stat(follow_symlinks=False).st_mtime
                    except OSError:
                        continue
        except OSError:
            continue


OPS = {"look": look, "written": written}
