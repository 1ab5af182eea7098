"""The ranks of a job on this host: their starts, their ends, their output, their number.

A rank's script records when the rank started and how it ended (`node.job.rank_processes`). A killed script records
nothing, so this module looks for its process. It counts the process as gone only if this agent has seen processes of
the job's container, because an agent in another PID namespace than the Docker engine sees none.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import math
import os
import re
import signal
import socket
import time
from typing import Any, Collection, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, OpReply
from gpurun.node.agent.processes import Process, is_same, open_files
from gpurun.node.job import parts, rank_processes
from gpurun.node.job.rank_processes import STREAMS, Name, RankFolders, RankState, age_since_s

# Read the kernel's table of TCP connections (man proc_net_tcp).


ESTABLISHED, SYN_SENT, SYN_RECV, TIME_WAIT, LISTEN = "01", "02", "03", "06", "0A"  # Linux, include/net/tcp_states.h
TIME_WAIT_S = 60.0
"""Linux, include/net/tcp.h: TCP_TIMEWAIT_LEN."""
_TICKS = 100.0


class TcpRow(NamedTuple):
    """One end of a connection, or a socket that listens.

    Attributes:
        inode: "0" if no process has it any more.
        closed_s: since when it is closed, in seconds; None if it is not, or if that cannot be known.
    """

    local: Tuple[str, int]
    remote: Tuple[str, int]
    state: str
    inode: str
    closed_s: Optional[float] = None


def rows(process: str) -> Iterator[TcpRow]:
    """Yield the connections in the network of a process: its pid, or ``self``.

    An IPv4 connection of an IPv6 socket has its IPv4 address.
    """
    for family in ("tcp", "tcp6"):
        try:
            with open("/proc/%s/net/%s" % (process, family)) as stream:
                lines = stream.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield TcpRow(_end(fields[1]), _end(fields[2]), fields[3], fields[9], _closed_s(fields[3], fields[5]))


def _closed_s(state: str, timer: str) -> Optional[float]:
    """Return since when a connection waits. Its timer, 3, says how long it still will."""
    kind, _, left = timer.partition(":")
    return TIME_WAIT_S - int(left, 16) / _TICKS if state == TIME_WAIT and kind == "03" else None


def _end(text: str) -> Tuple[str, int]:
    """Return address and port: words of four bytes in this machine's order, which is little-endian."""
    address, port = text.split(":")
    packed = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    if len(packed) == 16 and packed[:12] == bytes(10) + b"\xff\xff":
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)


# Tell whether the ranks of a gang have connected to each other, by the kernel's table of TCP connections.


NOT_CONNECTED = (LISTEN, SYN_SENT, SYN_RECV)
FEW_REMEMBERED = 1024
"""A kernel that remembers fewer closed connections may have forgotten the ranks'."""
_LIMIT = "/proc/sys/net/ipv4/tcp_max_tw_buckets"


def look_at_meeting(
    call: Call, job: str, attempt: int, addresses: List[str], ports: List[int], spared: List[int]
) -> Dict[str, Any]:
    """Look once at the ranks here.

    Args:
        addresses: IPv4, of the gang's hosts.
        ports: where the gang meets, as far as known; ranks on this host may tell one more.
        spared: where others listen on the gang's hosts, such as the job's sshd.

    Returns:
        ``{"ranks", "ports", "met"}``: the numbers of the ranks that run here and whose connections can be seen; the
        ports; whether ranks are or were connected. If that cannot be known, `met` is true.
    """
    mine = _network("self")
    ranks = [one for one in rank_processes.of_job(job, attempt) if mine and _network(str(one.process.pid)) == mine]
    told = {one.environ.get(rank_processes.RENDEZVOUS[1], "") for one in ranks}
    known = {int(port) for port in ports} | {int(port) for port in told if port.isascii() and port.isdigit()}
    known = {port for port in known if 0 < port < 1 << 16}
    owners: Dict[str, int] = {}
    for one in ranks:
        for path in open_files(one.process.pid).values():
            if path.startswith("socket:["):
                owners[path[8:-1]] = one.rank
    table = list(rows("self"))
    since_s = _running_s(job, attempt, is_seen=bool(ranks))
    later = [row for row in table if row.closed_s is None or row.closed_s <= since_s]
    is_met = not _remembers(len(table)) or have_met(later, owners, addresses, known, spared)
    return {"ranks": sorted({one.rank for one in ranks}), "ports": sorted(known), "met": is_met}


def have_met(
    table: Sequence[TcpRow],
    owners: Mapping[str, int],
    addresses: Collection[str],
    ports: Collection[int],
    spared: Collection[int],
) -> bool:
    """Return whether the table shows that ranks are or were connected. What may be their connection counts as one.

    Args:
        owners: inode of a socket → the rank that has it open.
    """
    listened = {row.local[1] for row in table if row.state == LISTEN} | {*spared}
    by_ends = {(row.local, row.remote): owners.get(row.inode) for row in table}
    for row in table:
        if row.state in NOT_CONNECTED:
            continue
        ends = {row.local[1], row.remote[1]}
        if not ends.isdisjoint(ports):
            return True
        rank = owners.get(row.inode)
        if rank is not None:
            if _is_near(row.remote[0], addresses) and by_ends.get((row.remote, row.local)) != rank:
                return True
        elif row.inode == "0" and ends.isdisjoint(listened) and _is_inside(row, addresses):
            return True  # closed, and nobody listens there any more: it may have been the ranks'
    return False


def _is_near(address: str, addresses: Collection[str]) -> bool:
    """Return whether a host of the gang may have this address, perhaps by another network than the fabric."""
    return address in addresses or not ipaddress.ip_address(address).is_global


def _is_inside(row: TcpRow, addresses: Collection[str]) -> bool:
    ends = (row.local[0], row.remote[0])
    return all(address in addresses or ipaddress.ip_address(address).is_loopback for address in ends)


def _running_s(job: str, attempt: int, is_seen: bool) -> float:
    """Return since when ranks have run here; 0 if none has started. What was closed before was not theirs, such as the
    connections of gpurun's checks just before the start, and those of horovodrun between hosts until it starts ranks.

    Args:
        is_seen: ranks run here; without a folder of theirs, infinite.
    """
    with RankFolders(job, attempt) as folder:
        first = min((name.started for name in folder.names()), default=0)
    with open("/proc/uptime") as stream:
        up_s = float(stream.read().split()[0])
    unknown_s = math.inf if is_seen else 0.0
    return up_s - first / os.sysconf("SC_CLK_TCK") if first else unknown_s


def _network(process: str) -> str:
    """Return which network a process is in; "" if that cannot be known."""
    try:
        return os.readlink("/proc/%s/ns/net" % process)
    except OSError:
        return ""


def _remembers(entries: int) -> bool:
    """Return whether the kernel remembers closed connections: not if its table has many, and may have no room."""
    try:
        with open(_LIMIT) as stream:
            return int(stream.read()) >= max(FEW_REMEMBERED, 2 * entries)
    except (OSError, ValueError):
        return False


# Cut the ranks' connections to each other.


_SOCKET = re.compile(r"socket:\[(\d+)\]\Z")
# The same numbers on every architecture (Linux 5.3 and 5.6).
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438


HOLD_S = 0.5
"""How long the ranks stand still, so that those of other hosts, which are cut at about the same time, do too."""


def cut(call: Call, job: str, addresses: List[str], hold_s: float = HOLD_S) -> Dict[str, int]:
    """Shut down the ranks' TCP connections to these addresses, except those to the launcher's rendezvous.

    Stops the ranks meanwhile. Otherwise a rank that continues while others wait would send unexpected data, and Gloo
    ends a process for that (``op.preamble.length <= op.nbytes``).

    Args:
        addresses: IPv4, of the gang's hosts.
        hold_s: how long the ranks are stopped.

    Returns:
        ``{"cut", "refused"}``: how many connections were cut; how many the kernel did not allow (Yama's
        ``ptrace_scope``, or a kernel before 5.6). Those ranks wait for their time-out.
    """
    done = {"cut": 0, "refused": 0}
    held = [one for one in rank_processes.of_job(job) if _to_cut(one.process.pid, one.environ, addresses)]
    try:
        for one in held:
            _send(one.process, signal.SIGSTOP)
        for one in held:
            for descriptor in _to_cut(one.process.pid, one.environ, addresses):
                try:
                    _shut_down(one.process.pid, descriptor)
                    done["cut"] += 1
                except (PermissionError, NotImplementedError):
                    done["refused"] += 1
                except OSError:
                    pass  # the rank has closed it, or ended
        if done["cut"]:
            call.wait(hold_s)
    finally:
        for one in held:
            _send(one.process, signal.SIGCONT)
    return done


def _to_cut(pid: int, environ: Dict[str, str], addresses: List[str]) -> List[int]:
    spared = tuple(environ.get(name, "") for name in rank_processes.RENDEZVOUS)
    inodes = {inode for inode, to, port in _connections(pid) if to in addresses and (to, port) != spared}
    return _descriptors(pid, inodes)


def _send(process: Process, number: int) -> None:
    if is_same(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            pass


def _connections(pid: int) -> Iterator[Tuple[str, str, str]]:
    """Yield (inode, remote address, remote port) of TCP connections in a process's network."""
    for row in rows(str(pid)):
        if row.state == ESTABLISHED:
            yield row.inode, row.remote[0], str(row.remote[1])


def _descriptors(pid: int, inodes: Set[str]) -> List[int]:
    found = []
    for descriptor, path in open_files(pid).items():
        match = _SOCKET.match(path)
        if match and match.group(1) in inodes:
            found.append(descriptor)
    return found


def _shut_down(pid: int, descriptor: int) -> None:
    """Shut down a socket of another process, as if both sides had done so (man pidfd_getfd).

    Raises:
        PermissionError: Yama or another guard forbids it.
        NotImplementedError: this kernel cannot do it.
        OSError: the process or its socket is gone.
    """
    process = _system_call(_PIDFD_OPEN, pid, 0)
    try:
        mine = _system_call(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    with socket.socket(fileno=mine) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _system_call(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise NotImplementedError(number) if code == errno.ENOSYS else OSError(code, os.strerror(code))
    return result


# Find programs below ranks that start processes of their own, such as ``torchrun``, by their command lines.


MOST_WORDS = 20
"""A program's name is among so many first words of a command line."""
_TAKES = re.compile(r"-[A-Za-z]*?[XWQ]\Z")


def find_starters(job: str, attempt: int, names: Sequence[Sequence[str]]) -> List[Dict[str, Any]]:
    """Return the ranks that have started one of these programs.

    Args:
        names: of each program, the first words of its command line, such as ``["accelerate", "launch"]``, or
            ``["-m", "torch.distributed.run"]`` for a module of Python.

    Returns:
        ``{"rank", "which"}`` for each rank, in order: `which` is the program's place in `names`.
    """
    found: Dict[int, int] = {}
    for each in rank_processes.of_job(job, attempt):
        which = named(each.process.command, names)
        if which is not None:
            found[each.rank] = min(which, found.get(each.rank, which))
    return [{"rank": rank, "which": which} for rank, which in sorted(found.items())]


def named(command: str, names: Sequence[Sequence[str]]) -> "int | None":
    """Return which program a command line starts; None if it starts none of them."""
    words = command[: 1 << 12].split()[:MOST_WORDS]
    if words and re.match(r"(python|pypy)[0-9.]*\Z", _file(words[0])):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if _TAKES.match(words[0]) else 1]
    if words and words[0] != "-m":
        words[0] = _file(words[0])
    for which, name in enumerate(names):
        if name and words[: len(name)] == list(name):
            return which
    return None


def _file(path: str) -> str:
    return path.rpartition("/")[2]


POLL_S = 0.1
ENDED_LOOKS = 10
"""A rank that has ended is looked at every so many polls: what it left behind may still print."""
MOST_WAIT_S = 0.5
"""So long the end of a rank waits for its last words. Copying a gigabyte takes minutes, its rank is named before.
So long, too, it waits for the end of its container, if it was killed together with its script."""
PIECE_BYTES = 1 << 16
PIECES = 16
"""So many of one output are sent before the other ranks have their turn."""
KILLED = 128 + signal.SIGKILL


def count(call: Call, job: str) -> int:
    """Return the number of processes of ranks."""
    return len(rank_processes.of_job(job))


def list_ranks(call: Call, job: str, attempt: int) -> List[Dict[str, Any]]:
    """Return the ranks that have reported here, in the order of their start.

    Returns:
        A list of ``{"id", "rank", "code", "age_s"}``: ``rank`` is the present number, which an elastic launcher may
        have changed; ``code`` is None for a running rank; ``age_s`` is the time since its start.
    """
    scripts = _Scripts(job, attempt)
    found = []
    with RankFolders(job, attempt) as folder:
        for name in folder.names():
            seen = folder.see(name.id)
            if seen is not None:
                code = seen.code if seen.code is not None else KILLED if scripts.is_gone(name) else None
                age_s = age_since_s(seen.begun_s)
                found.append({"id": name.id, "rank": folder.number_now(name), "code": code, "age_s": age_s})
    return found


def follow(
    call: Call, job: str, attempt: int, have: Dict[str, List[int]], once: bool = False, rest_bytes: Optional[int] = None
) -> Iterator[OpReply]:
    """Yield what ranks report and print, as it happens, until cancelled.

    Args:
        have: by rank's id, how much of each of `STREAMS` is already known. Output continues there; starts and ends are
            reported again.
        once: end after everything present has been sent.
        rest_bytes: skip what all ranks have printed but for about so many last bytes; None = skip nothing.

    Yields:
        ``{"kind": "start", "id", "rank", "age_s"}``;
        ``{"kind": "output", "id", "rank", "stream", "end"}``: ``stream`` is one of `STREAMS`; the payload of at
        most 64 KiB ends at the offset ``end``;
        ``{"kind": "end", "id", "rank", "code", "age_s"}``: after all earlier output; if that takes long, before the
        rest of it, with ``"more": True``. A rank whose script was killed, too, has code 137 and ``"killed": True``,
        with ``"container": True`` if all other processes in its container ended with it; if another code follows later,
        that one is right. An id is new for every start of a rank, also after the host has left the gang and come back.
    """
    scripts = _Scripts(job, attempt)
    ranks: Dict[str, _Rank] = {}
    look = 0
    while True:
        more = is_due = False
        with RankFolders(job, attempt) as folder:
            for name in folder.names():
                rank = ranks.get(name.id)
                if rank is None:
                    rank = ranks[name.id] = _Rank(name, have.get(name.id, ()))
                    if rest_bytes is not None:
                        rank.skip(folder, rest_bytes // max(1, len(folder.names())))
                if rank.code is None or rank.more or look % ENDED_LOOKS == 0:
                    yield from rank.news(folder, scripts)
                    more, is_due = more or rank.more, is_due or rank.is_due
        look += 1
        if once and not more and not is_due:
            return
        call.wait(0.0 if more else POLL_S)


def release_output(call: Call, job: str, attempt: int, known: Dict[str, List[int]]) -> Dict[str, int]:
    """Free the disk space of output that the head has synced. `follow` continues after it.

    Args:
        known: by rank's id, how much of each of `STREAMS` the head has on its disk.

    Returns:
        ``{"bytes"}``: how many were freed.
    """
    freed = 0
    with RankFolders(job, attempt) as folder:
        for name in folder.names():
            for stream, until in zip(STREAMS, known.get(name.id, ())):
                freed += folder.release(name.id, stream, int(until))
    return {"bytes": freed}


class _Scripts:
    """The processes of scripts that have not recorded an end."""

    def __init__(self, job: str, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._found: Dict[str, Optional[processes.Process]] = {}
        self._sees_containers = False

    def is_gone(self, name: Name) -> bool:
        """Return whether a script that has reported its start no longer runs."""
        if name.id not in self._found:
            self._look()
            self._found.setdefault(name.id, None)
        process = self._found[name.id]
        return self._sees_containers if process is None else not processes.is_same(process)

    def fell_with_container(self, name: Name) -> bool:
        """Return whether a script that was running is gone together with everything else in the job's container."""
        return self._found.get(name.id) is not None and parts.is_ending(self._job)

    def _look(self) -> None:
        living = processes.list_processes()
        with RankFolders(self._job, self._attempt) as folder:
            for name in folder.names():
                process = rank_processes.script_of(self._job, name, living)
                if process is not None:
                    self._found.setdefault(name.id, process)
        main = processes.noted(os.path.join(parts.job_folder(self._job), parts.MAIN_FILE))
        self._sees_containers = self._sees_containers or any(self._found.values()) or main is not None


class _Due(NamedTuple):
    """An end to report. `ended_s` is by the host's clock; `since_s`, when it was seen, by the monotonic clock."""

    code: int
    sizes: Tuple[int, ...]
    ended_s: float
    since_s: float
    is_killed: bool = False


class _Rank:
    """How much of one rank has been reported."""

    def __init__(self, name: Name, have: Sequence[int]) -> None:
        self._name = name
        self._offsets = [max(0, int(have[index])) if index < len(have) else 0 for index in range(len(STREAMS))]
        self._begun = False
        self._due: Optional[_Due] = None
        self.code: Optional[int] = None
        """The last that was told."""
        self.more = False
        """Whether there is more to send than was sent."""

    @property
    def is_due(self) -> bool:
        """Return whether its end is known but not reported yet."""
        return self._due is not None

    def skip(self, folder: RankFolders, rest_bytes: int) -> None:
        """Continue at a line that begins in the last `rest_bytes` of each output."""
        seen = folder.see(self._name.id)
        if seen is None:
            return
        for index, stream in enumerate(STREAMS):
            begin = seen.sizes[index] - rest_bytes
            if begin > self._offsets[index]:
                _, data = folder.read(self._name.id, stream, begin, PIECE_BYTES)
                self._offsets[index] = begin + data.find(b"\n") + 1

    def news(self, folder: RankFolders, scripts: _Scripts) -> Iterator[OpReply]:
        """Yield its start, its new output, its end."""
        seen = folder.see(self._name.id)
        if seen is None:
            self.more = False
            return
        if not self._begun:
            self._begun = True
            yield self._say("start", age_s=age_since_s(seen.begun_s))
        self._note_end(seen, folder, scripts)
        self.more = False
        for index, stream in enumerate(STREAMS):
            yield from self._output(folder, index, stream, seen.sizes[index])
        if self._due is not None:
            due = self._due
            is_all = all(offset >= min(due.sizes[i], seen.sizes[i]) for i, offset in enumerate(self._offsets))
            is_gone = due.is_killed and scripts.fell_with_container(self._name)
            is_known = is_all and (is_gone or not due.is_killed)
            if is_known or time.monotonic() - due.since_s >= MOST_WAIT_S:
                self._due, self.code = None, due.code
                facts = {"killed": due.is_killed, "container": is_gone, "more": not is_all}
                told = {name: True for name, is_so in facts.items() if is_so}
                yield self._say("end", code=due.code, age_s=age_since_s(due.ended_s), **told)

    def _note_end(self, seen: RankState, folder: RankFolders, scripts: _Scripts) -> None:
        """Make an unreported end due after all present output has been sent."""
        if seen.code is None and self.code is None and self._due is None and scripts.is_gone(self._name):
            again = folder.see(self._name.id)  # it may have noted its end just before it went
            if again is not None and again.code is not None:
                seen = again
            else:
                self._due = _Due(KILLED, seen.sizes, time.time(), time.monotonic(), is_killed=True)
        if seen.code is not None and seen.code != self.code and (self._due is None or self._due.code != seen.code):
            self._due = _Due(seen.code, seen.sizes, seen.ended_s, time.monotonic())

    def _output(self, folder: RankFolders, index: int, stream: str, size: int) -> Iterator[OpReply]:
        if self._offsets[index] > size:
            self._offsets[index] = 0  # the program has cut it short
        for _ in range(PIECES):
            begin = self._offsets[index]
            end, data = folder.read(self._name.id, stream, begin, PIECE_BYTES)
            if end == begin:
                return
            self._offsets[index] = end
            yield OpReply(self._say("output", stream=stream, end=end).value, data)
        self.more = self.more or self._offsets[index] < size

    def _say(self, kind: str, **facts: Any) -> OpReply:
        return OpReply({"kind": kind, "id": self._name.id, "rank": self._name.rank, **facts})


def starters(call: Call, job: str, attempt: int, names: List[List[str]]) -> List[Dict[str, Any]]:
    """Return the ranks that have started one of these programs: `rank_starters.find`."""
    return find_starters(job, attempt, names)


OPS = {
    "count": count,
    "cut": cut,
    "follow": follow,
    "list": list_ranks,
    "look": look_at_meeting,
    "release": release_output,
    "starters": starters,
}
