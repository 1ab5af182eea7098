"""Hosts without GPUs that run gangs' servers. Gangs share these hosts; a lease only names them.

A gang with servers starts if its GPUs fit and at least one such host can be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gpurun.inventory.model import Host
from gpurun.jobs.spec import Grant, Placement
from gpurun.scheduler.model import Gang, Reason, Refusal, Running, Snapshot


def refuse(gang: Gang, snapshot: Snapshot) -> Refusal | None:
    """Why the servers of a gang have no host; None if they have one."""
    inventory = snapshot.inventory
    number, hosts = gang.wants.servers
    if not number:
        return None
    for name in (name for name in hosts if "=" not in name):
        host = inventory.by_name.get(name)
        if host is None:
            return Refusal(True, Reason.IMPOSSIBLE, f"the host {name!r} for parameter servers is not in the inventory")
        if host.gpus:
            return Refusal(True, Reason.IMPOSSIBLE, f"the host {name!r} for parameter servers has GPUs")
    able, asked = _able(hosts, snapshot), " or ".join(hosts)
    if not able:
        return Refusal(True, Reason.IMPOSSIBLE, f"no host without GPUs has the label {asked} for parameter servers")
    why = sorted({snapshot.unusable[host.name] for host in able if host.name in snapshot.unusable})
    if all(host.name in snapshot.unusable for host in able):
        words = f"parameter servers need a host without GPUs ({asked}), and none can be used: {', '.join(why)}"
        return Refusal(False, Reason.HOSTS, words)
    return None


def with_servers(gang: Gang, placement: Placement, snapshot: Snapshot, running: Iterable[Running]) -> Placement:
    """A placement of a gang's GPUs, and behind them the hosts of its servers, if it has some there.

    Hosts it failed on come last; before them those that carry fewest gangs' servers, in a rack of the gang if there is
    one, in the inventory's order.

    Args:
        running: all gangs that hold GPUs.
    """
    number, hosts = gang.wants.servers
    if not number:
        return placement
    busy = Counter(grant.host for run in running for grant in run.placement.grants if not grant.gpus)
    able = [host for host in _able(hosts, snapshot) if host.name not in snapshot.unusable]
    able.sort(key=lambda host: (host.name in gang.avoid, busy[host.name], host.rack not in placement.racks))
    chosen = tuple(Grant(host.name, ()) for host in able[:number])
    return replace(placement, grants=(*placement.grants, *chosen))


def _able(asked: tuple[str, ...], snapshot: Snapshot) -> list[Host]:
    return [host for host in snapshot.inventory.hosts if not host.gpus and _is_asked(host, asked)]


def _is_asked(host: Host, asked: tuple[str, ...]) -> bool:
    return host.name in asked or any(f"{key}={value}" in asked for key, value in host.labels.items())
