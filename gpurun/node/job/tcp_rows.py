"""Read the kernel's table of TCP connections (man proc_net_tcp)."""

import socket
from typing import Iterator, NamedTuple, Optional, Tuple

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
