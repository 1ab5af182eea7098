"""STOPPING of a simulated gang."""

from __future__ import annotations

from gang_head import Head
from gang_world import GRACE_S

from gpurun.errors import HostFailure
from gpurun.jobs.states import State


def stop(job: Head) -> State:
    """STOPPING: notice, grace, the containers' end, the fence. Errors come as planned; the end stays as decided."""
    world = job.world
    there = [host for host in world.hosts.values() if host.is_reachable and not world.is_left(host.name)]
    world.sleep(0.3)
    if job.record.ladder:
        for rank in world.ranks:
            if world.hosts[rank.host] in there:
                world.in_attempt(
                    world.between(0.05, GRACE_S, "grace", rank.number), world.end_rank, rank, 143, "notice"
                )
        until_s = world.now_s + GRACE_S
        while world.now_s < until_s and any(rank.ended_s is None for rank in world.ranks):
            world.sleep(0.5)
    if world.stop_errors:
        world.stop_errors -= 1
        world.note("to end it fails for now")
        raise HostFailure("the fence failed", host=world.first.name)
    for host in there:
        world.end_box(host, 137, "fence")
    world.sleep(0.5)
    world.finish()
    job.record = world.record
    return world.record.state
