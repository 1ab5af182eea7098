"""More GPUs for an elastic gang that runs with fewer than it asked for. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpurun.scheduler.model import Gang, Placement, Snapshot
from gpurun.scheduler.policy import DEFAULT, Policy
from gpurun.scheduler.schedule import schedule


def growth(snapshot: Snapshot, gang: Gang, now: Placement, policy: Policy = DEFAULT) -> Placement | None:
    """What an elastic gang may take besides, on hosts it does not touch yet; None if there is nothing for it.

    It comes last: as long as any gang waits it gets nothing. Its own racks come before others; its pool's limits hold.

    Args:
        snapshot: the gang is among its running ones.
        gang: with the `gpus` it asked for.
        now: all it holds, also what it is about to give back.
    """
    wants = gang.constraints
    step = wants.gpus_per_host or 1
    missing = (gang.gpus - now.gpus) // step * step
    if snapshot.queue or missing <= 0 or wants.locality == "host":
        return None
    others = _alike(snapshot, gang, now)
    near = tuple(name for name in others if snapshot.inventory.by_name[name].rack in now.racks)
    for hosts in dict.fromkeys((near, others if wants.locality == "any" else near)):
        more = replace(wants, hosts=hosts, generations=(now.generation,), prefer="any", locality_wait_s=0.0)
        rest = replace(gang, id=f"{gang.id}+", gpus=missing, min_gpus=step, constraints=more, kept=None)
        starts = schedule(replace(snapshot, queue=(rest,)), policy).starts if hosts else ()
        if starts:
            return starts[0][1]
    return None


def _alike(snapshot: Snapshot, gang: Gang, now: Placement) -> tuple[str, ...]:
    """Hosts that ranks of the gang could be on as well: horovodrun takes one network interface for all."""
    inventory, wanted = snapshot.inventory, gang.constraints.hosts
    interface = inventory.fabric_of(inventory.by_name[now.hosts[0]]).interface
    return tuple(
        host.name
        for host in inventory.hosts
        if host.generation == now.generation and host.name not in now.hosts and (not wanted or host.name in wanted)
        and inventory.fabric_of(host).interface == interface
    )  # fmt: skip
