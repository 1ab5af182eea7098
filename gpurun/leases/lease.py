"""A lease as a value: which GPUs a gang owns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpurun.errors import StateError
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.spec import Grant, check_path

MOST_PORTS = 1 << 16
_MACHINE = re.compile(r"\S+:\d{1,5}")


@dataclass(frozen=True)
class HostPlace:
    """Where a gang's containers and files are on a host that is not arranged as most are.

    Attributes:
        docker_host, folder: as `gpurun.inventory.model.Host` had them.
    """

    docker_host: str | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Lease:
    """A gang's GPUs, all of them, for one attempt.

    Attributes:
        grants: in rank order.
        ssh_port: the port of the job's own sshd, or the first of its ranks' ports.
        port_count: how many ports from there on are the gang's, and no other lease's of this state directory.
        granted_s: seconds since the epoch.
        inventory: the canonical path of the inventory that names these hosts.
        lost: the rest of an attempt that is over: hosts that could not be fenced and keep their GPUs.
        found: a lost one that was made from what hosts claim, because no lease was there: nobody brought outputs home.
        apart: hosts that hold GPUs of an elastic gang without being part of it: on their way in, or out.
        joins: hosts that came to an elastic gang after its start, oldest first, each as often as it came.
        machines: host → `gpurun.inventory.model.Host.machine` as it was at the grant. Leases of older versions lack it.
        places: the same for a host's engine and folder, where the inventory named them.

    Raises:
        ValueError: `inventory` is no path, one of `machines` is none, or no host has so many ports; what reads a file
            takes that for damage.
    """

    job: str
    attempt: int
    owner: str
    owner_uid: int
    generation: str
    racks: tuple[str, ...]
    grants: tuple[Grant, ...]
    ssh_port: int
    granted_s: float
    inventory: str
    lost: bool = False
    found: bool = False
    apart: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    machines: Mapping[str, str] = field(default_factory=dict, hash=False)
    places: Mapping[str, HostPlace] = field(default_factory=dict, hash=False)
    version: int = 1
    port_count: int = 1

    def __post_init__(self) -> None:
        check_path(self.inventory)
        for machine in self.machines.values():
            if not _MACHINE.fullmatch(machine):
                raise ValueError(f"{machine[:80]!r} is no machine")
        if not 1 <= self.port_count <= MOST_PORTS:
            raise ValueError(f"{self.port_count} is no number of ports")

    @property
    def name(self) -> str:
        """Its file's name without ``.json``."""
        return f"{self.job}.{self.attempt}.lost" if self.lost else self.job

    @property
    def ports(self) -> range:
        """The TCP ports that are the gang's on each of its hosts."""
        return range(self.ssh_port, self.ssh_port + self.port_count)

    @property
    def members(self) -> tuple[Grant, ...]:
        """The grants on which ranks run."""
        return tuple(grant for grant in self.grants if grant.host not in self.apart)


@dataclass(frozen=True)
class Holdings:
    """What `LeaseStore.read_all` found.

    Attributes:
        damaged: one error for each file that is not a readable lease. Their GPUs are unknown, so as long as
            there is one, nothing new may be granted.
    """

    leases: tuple[Lease, ...]
    damaged: tuple[StateError, ...]


def machines_of(inventory: Inventory, grants: Iterable[Grant]) -> dict[str, str]:
    """Host → machine, for the hosts of some grants."""
    return {grant.host: inventory.by_name[grant.host].machine for grant in grants}


def places_of(inventory: Inventory, grants: Iterable[Grant]) -> dict[str, HostPlace]:
    """Host → engine and folder, for the hosts of some grants that have their own."""
    hosts = (inventory.by_name[grant.host] for grant in grants)
    return {host.name: HostPlace(host.docker_host, host.folder) for host in hosts if host.docker_host or host.folder}


def as_granted(inventory: Inventory, lease: Lease) -> Inventory:
    """An inventory in which the hosts of a lease are the machines that they were at the grant.

    Somebody can give a host another address, engine or folder, or remove it, while a gang runs there. The gang's
    containers are still on the old machine, and only a fence of that machine frees its GPUs.
    """
    granted = {grant.host for grant in lease.grants}
    hosts = [_as_granted(host, lease) if host.name in granted else host for host in inventory.hosts]
    hosts += [_removed_host(grant, inventory, lease) for grant in lease.grants if grant.host not in inventory.by_name]
    return replace(inventory, hosts=tuple(hosts))


def _as_granted(host: Host, lease: Lease) -> Host:
    machine, place = lease.machines.get(host.name), lease.places.get(host.name, HostPlace())
    host = replace(host, docker_host=place.docker_host, folder=place.folder)
    if machine is None or machine == host.machine:
        return host
    address, _, port = machine.rpartition(":")
    return replace(host, address=address, port=int(port))


def _removed_host(grant: Grant, inventory: Inventory, lease: Lease) -> Host:
    """A host that the inventory does not name any more. Its other hosts say how to log in."""
    like = next((host for host in inventory.hosts if host.generation == lease.generation), None)
    like = like or next(iter(inventory.hosts), None)  # somebody may have removed all of them
    rack, fabric, user = (like.rack, like.fabric, like.user) if like else ("", next(iter(inventory.fabrics), ""), None)
    host = Host(grant.host, rack, lease.generation, max(grant.gpus, default=0) + 1, fabric, user=user)
    return _as_granted(host, lease)
