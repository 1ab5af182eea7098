"""STOPPING of a simulated gang: the real `stop.stop`, with stand-ins for the state directory and for copied bytes.

Real are the ladder, when outputs are collected, the fence's retries, when a host counts as lost, and the order of all
that. What a lost host's keeper does later is not simulated here, but in tests/ownership.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gang_events import EventfulWorld

from gpurun.errors import HostFailure, StateError
from gpurun.jobs.record import JobRecord
from gpurun.node.folder.contents import Listed
from gpurun.state.hosts import Cordon
from gpurun.supervisor.outputs.listing import HostOutputs

if TYPE_CHECKING:
    from gang_head import Head


class Leases:
    """Stands for `gpurun.leases.store.LeaseStore`."""

    def __init__(self, world: EventfulWorld) -> None:
        self._world = world

    def release(self, _lock: object) -> None:
        self._world.free(lost=())

    def abandon(self, _lock: object, _lease: object, lost: Collection[str]) -> None:
        self._world.free(lost=lost)


@dataclass(frozen=True)
class Cordons:
    """Stands for `gpurun.state.hosts.Cordons`."""

    world: EventfulWorld

    @contextmanager
    def changing(self) -> Iterator[dict[str, Cordon]]:
        yield self.world.cordons


@dataclass(frozen=True)
class AllocatorLock:
    """Stands for `gpurun.leases.store.AllocatorLock`."""

    world: EventfulWorld

    @contextmanager
    def held(self, *, patience_s: float | None) -> Iterator[None]:
        self.world.sleep(0.05)
        if self.world.stop_errors:
            self.world.stop_errors -= 1
            self.world.note("the state directory cannot be used for now")
            raise StateError("the file system of the state directory cannot lock files")
        yield


def finish(world: EventfulWorld, _record: JobRecord, *, now_s: float) -> JobRecord:
    """Stands for `gpurun.jobs.store.finish`."""
    world.finish()
    return world.record


def list_outputs(agent: Any, job: str, *, force: bool, before: object) -> HostOutputs | None:
    """Stands for `gpurun.supervisor.outputs.listing.list_outputs`."""
    if not agent.call("outputs.list", job=job, force=force).value:
        return None
    return HostOutputs(agent.host, {"model": Listed("model", "file")})


class HeadOutputs:
    """Stands for `gpurun.supervisor.outputs.copy.HeadCopy`: the copy is as the host's folder was when it began."""

    def __init__(self, job: Head) -> None:
        self._job = job
        self.listed: dict[str, HostOutputs] = {}
        self.keeper = SimpleNamespace(  # it keeps no whole copies
            make_room=lambda _left: False, forget=lambda: None, notes=list,
        )  # fmt: skip

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replace(self, _agents: object, hosts: Sequence[HostOutputs], **_: object) -> tuple[()]:
        world = self._job.world
        for host in (each.host for each in hosts):
            written_s = world.written_s()
            world.sleep(world.between(0.1, 2.0, "copy", host))
            if world.copy_errors or not (self._job.links.is_open(host) and world.hosts[host].is_reachable):
                world.copy_errors = max(0, world.copy_errors - 1)
                raise HostFailure("the copy broke off", host=host)
            world.copied_s = written_s
            world.note(f"the outputs of {host} are on the head")
        return ()

    def tell_of_versions(self) -> None:
        """No host has a file that another one has."""
