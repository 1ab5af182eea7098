"""Cut the ranks' connections to each other.

When a rank dies, only ranks that happen to read from it notice; others wait for their neighbours until Gloo's time-out.
`cut` shuts down the sockets of all ranks, so that all notice immediately.
"""

import ctypes
import errno
import os
import re
import signal
import socket
from typing import Dict, Iterator, List, Set, Tuple

from gpurun.node.agent.call import Call
from gpurun.node.agent.processes import Process, is_same, open_files
from gpurun.node.job import rank_processes, tcp_rows

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
    for row in tcp_rows.rows(str(pid)):
        if row.state == tcp_rows.ESTABLISHED:
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
