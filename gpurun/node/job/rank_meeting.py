"""Tell whether the ranks of a gang have connected to each other, by the kernel's table of TCP connections.

Whoever forms a group connects over TCP, whatever carries its data later: PyTorch's store, Gloo, NCCL's start, JAX's
coordinator. A connection that was closed stays in the table for a minute (TIME_WAIT), on the host that closed it first.
"""

import ipaddress
import math
import os
from typing import Any, Collection, Dict, List, Mapping, Sequence

from gpurun.node.agent.call import Call
from gpurun.node.agent.processes import open_files
from gpurun.node.job import rank_folders, rank_processes
from gpurun.node.job.tcp_rows import LISTEN, SYN_RECV, SYN_SENT, TcpRow, rows

NOT_CONNECTED = (LISTEN, SYN_SENT, SYN_RECV)
FEW_REMEMBERED = 1024
"""A kernel that remembers fewer closed connections may have forgotten the ranks'."""
_LIMIT = "/proc/sys/net/ipv4/tcp_max_tw_buckets"


def look(
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
    with rank_folders.RankFolders(job, attempt) as folder:
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
