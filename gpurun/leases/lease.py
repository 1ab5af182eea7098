"""A lease as a value: the GPUs that a gang owns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpurun.errors import StateError
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.record import GpuHolder, HostRefusal, JobRecord
from gpurun.jobs.spec import Grant, check_path
from gpurun.scheduler.model import Decisions, Reason, Wait

MOST_PORTS = 1 << 16
_MACHINE = re.compile(r"\S+:\d{1,5}")


@dataclass(frozen=True)
class HostPlace:
    """A host's own Docker engine and folder, if the inventory sets them.

    Attributes:
        docker_host, folder: as `gpurun.inventory.model.Host` had them.
    """

    docker_host: str | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Lease:
    """All GPUs of a gang for one attempt.

    Attributes:
        grants: in rank order.
        ssh_port: the port of the job's own sshd, or the first of its ranks' ports.
        port_count: the number of consecutive ports that the gang owns; no other lease of this state directory has them.
        granted_s: seconds since the epoch.
        inventory: the canonical path of the inventory that names these hosts.
        lost: the lease is the rest of an ended attempt: hosts that could not be fenced and keep their GPUs.
        found: a lost lease that was made from claims on hosts, because the lease file was gone: its outputs were not
            copied.
        apart: hosts that hold GPUs of an elastic gang without being part of it, because they are joining or leaving.
        joins: hosts that joined an elastic gang after its start, oldest first, each as often as it joined.
        machines: host → `gpurun.inventory.model.Host.machine` at the grant. Leases of older versions lack it.
        places: the same for a host's engine and folder, if the inventory names them.
        ids: host → what the machine called itself (`gpurun.state.hosts.Machine.id`), as far as it was known.

    Raises:
        ValueError: `inventory` is not a path, one of `machines` is not valid, or no host has so many ports; readers of
            a file treat that as damage.
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
    ids: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_path(self.inventory)
        for machine in self.machines.values():
            if not _MACHINE.fullmatch(machine):
                raise ValueError(f"{machine[:80]!r} is not the address of a machine")
        if not 1 <= self.port_count <= MOST_PORTS:
            raise ValueError(f"{self.port_count} is not a number of ports")

    @property
    def name(self) -> str:
        """Return its file's name without ``.json``."""
        return f"{self.job}.{self.attempt}.lost" if self.lost else self.job

    @property
    def ports(self) -> range:
        """Return the gang's TCP ports on each of its hosts."""
        return range(self.ssh_port, self.ssh_port + self.port_count)

    @property
    def members(self) -> tuple[Grant, ...]:
        """Return the grants on which ranks run."""
        return tuple(grant for grant in self.grants if grant.host not in self.apart)


@dataclass(frozen=True)
class Holdings:
    """The result of `LeaseStore.read_all`.

    Attributes:
        damaged: one error for each file that is not a readable lease. Their GPUs are unknown, so while there is one, no
            pass may grant anything.
    """

    leases: tuple[Lease, ...]
    damaged: tuple[StateError, ...]


def machines_of(inventory: Inventory, grants: Iterable[Grant]) -> dict[str, str]:
    """Return host → machine, for the hosts of some grants."""
    return {grant.host: inventory.by_name[grant.host].machine for grant in grants}


def places_of(inventory: Inventory, grants: Iterable[Grant]) -> dict[str, HostPlace]:
    """Return host → engine and folder, for the hosts of some grants that have their own."""
    hosts = (inventory.by_name[grant.host] for grant in grants)
    return {host.name: HostPlace(host.docker_host, host.folder) for host in hosts if host.docker_host or host.folder}


def as_granted(inventory: Inventory, lease: Lease) -> Inventory:
    """Return the inventory in which the hosts of a lease are the machines that they were at the grant.

    While a gang runs on a host, somebody can change the host's address, engine or folder, or remove the host. The
    gang's containers are still on the old machine, and only a fence of that machine frees its GPUs.
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
    """Return a host that is no longer in the inventory. Uses the login settings of the inventory's other hosts."""
    like = next((host for host in inventory.hosts if host.generation == lease.generation), None)
    like = like or next(iter(inventory.hosts), None)  # somebody may have removed all of them
    rack, fabric, user = (like.rack, like.fabric, like.user) if like else ("", next(iter(inventory.fabrics), ""), None)
    host = Host(grant.host, rack, lease.generation, max(grant.gpus, default=0) + 1, fabric, user=user)
    return _as_granted(host, lease)


# What a user's jobs learned from hosts that refused a GPU. Pure.


FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
FORGET_S = 600.0
"""A host that refused so long ago starts again with the first pause."""


def remember(
    before: Sequence[HostRefusal], refused: Mapping[str, Iterable[GpuHolder]], *, now_s: float
) -> tuple[HostRefusal, ...]:
    """Add a refusal to a job's refusals. Each host that refuses again is left alone for twice as long.

    A host need not name all its held GPUs. Its earlier refusals of other GPUs stay valid until they expire.

    Args:
        before: the refusals in the job's record.
        refused: host → who holds its GPUs.
        now_s: the head's clock, seconds since the epoch.
    """
    renewed = {host: {gpu for holder in holders for gpu in holder.gpus} for host, holders in refused.items()}
    kept = [
        each for each in before
        if abs(now_s - each.until_s) < FORGET_S
        and (each.host not in renewed or (each.until_s > now_s and not renewed[each.host].issuperset(each.holder.gpus)))
    ]  # fmt: skip
    for host, holders in refused.items():
        pauses = [each.pause_s for each in before if each.host == host and abs(now_s - each.until_s) < FORGET_S]
        pause_s = min(2 * max(pauses), LONGEST_PAUSE_S) if pauses else FIRST_PAUSE_S
        kept += [HostRefusal(host, holder, until_s=now_s + pause_s, pause_s=pause_s) for holder in holders]
    return tuple(kept)


def active(records: Iterable[JobRecord], uid: int, now_s: float) -> tuple[HostRefusal, ...]:
    """Return the valid refusals of one user's jobs. A clock that was set back extends none."""
    return tuple(
        refusal
        for record in records
        if record.owner_uid == uid
        for refusal in record.refusals
        if 0.0 < refusal.until_s - now_s <= LONGEST_PAUSE_S
    )


def next_try_s(records: Iterable[JobRecord], uid: int, now_s: float) -> float | None:
    """Return when the first of this user's refusals ends, seconds since the epoch; None if none is valid."""
    return min((refusal.until_s for refusal in active(records, uid, now_s)), default=None)


# Starts that the scheduler decided, and that could not be granted. Pure.


def with_refused(decisions: Decisions, refused: Mapping[str, str]) -> Decisions:
    """Return the decisions, in which gangs with a refused grant wait.

    Args:
        refused: gang → why its grant was refused.
    """
    starts = tuple(start for start in decisions.starts if start[0].id not in refused)
    if len(starts) == len(decisions.starts):
        return decisions
    before, waits = [0], dict(decisions.waits)
    for gang, _ in decisions.starts:
        before.append(before[-1] + (gang.id not in refused))
        if gang.id in refused:
            waits[gang.id] = Wait(Reason.NO_ROOM, refused[gang.id], starts_before=before[-1])
    for name, wait in decisions.waits.items():
        waits[name] = replace(wait, starts_before=before[wait.starts_before])
    return replace(decisions, starts=starts, waits=waits)
