"""The occupancy: which gang holds which GPU of which machine. Every decision about GPUs reads it, every grant changes
it.

Pure. It contains leases, lost leases, leases whose file somebody removed, and GPUs that are promised to a gang. It
identifies a machine by the address that SSH connects to (`gpurun.inventory.model.Host.machine`), and by the id that the
machine gives, if it was known at the grant. So two inventories, or two paths of one inventory, that name the same
machine see the same holders, and so does a host that was renamed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gpurun.errors import StateError
from gpurun.inventory.model import Host, Inventory, machine_at
from gpurun.jobs.spec import Grant
from gpurun.leases.lease import Lease
from gpurun.state.known_as import KnownAs

CALLED = "id "
FOR_GOOD = ("lost", "foreign")
"""Holdings that also the job named in them cannot use."""


@dataclass(frozen=True)
class Holder:
    """The holder of a GPU.

    Attributes:
        job: the job's id.
        how: ``leased``; ``lost``: the rest of an attempt whose host could not be fenced; ``promised``: a queued gang of
            another inventory waits for it; ``foreign``: another user, state directory or head claims it on the
            host, or a process that no gpurun job started uses it.
        owner: the user's name; "" = unknown.
    """

    job: str
    how: str = "leased"
    owner: str = ""


class Occupancy:
    """Machine → GPU → holder. Made once per pass from all leases; only `grant` adds a gang's GPUs.

    Args:
        known: returns host → by what its machine is known, for an inventory. Default: by its address.

    Attributes:
        overlaps: GPUs that two leases hold: damage, each named once. Keeps both holders.
    """

    def __init__(
        self, leases: Iterable[Lease] = (), known: Callable[[Inventory], Mapping[str, KnownAs]] | None = None
    ) -> None:
        self.overlaps: list[StateError] = []
        self._known = known or (lambda _: {})
        self._machines: dict[str, dict[int, Holder]] = {}
        self._leases: dict[str, Lease] = {}
        for lease in leases:
            self._note_overlap(lease)
            self._put(lease)

    def on(self, host: Host, known: KnownAs | None = None) -> Mapping[int, Holder]:
        """Return the held GPUs of a host.

        Args:
            known: by what its machine is known; None = by its address.
        """
        held = self._machines.get(host.machine, {})
        others = [self._machines.get(_nameless(host.name))]
        if known is not None and known.id:
            others.append(self._machines.get(_called(known.id)))
        for more in others:
            held = {**more, **held} if more else held
        return held

    def taken(
        self, inventory: Inventory, *, but: Collection[str] = (), used: Collection[tuple[str, int]] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return host → held GPUs, without promises of the jobs in `but` and without the GPUs in `used`.

        Args:
            used: host and GPU of gangs that the caller counts itself.
        """
        taken = {}
        known = self._known(inventory) if self._machines else {}
        for host in inventory.hosts if self._machines else ():
            gpus = [
                gpu
                for gpu, holder in self.on(host, known.get(host.name)).items()
                if holder.how in FOR_GOOD or not (holder.job in but or (host.name, gpu) in used)
            ]
            if gpus:
                taken[host.name] = tuple(sorted(gpus))
        return taken

    def jobs_by_machine(self) -> dict[str, list[str]]:
        """Return machine, by its address → the jobs that hold GPUs of it."""
        return {
            machine: list(dict.fromkeys(holder.job for holder in held.values()))
            for machine, held in self._machines.items()
            if held and not machine.startswith(CALLED)
        }

    def grant(self, lease: Lease) -> None:
        """Give a lease its GPUs. Replaces an earlier lease of the same name, and overrides promises.

        Raises:
            StateError: as `check`. Nothing is changed then.
        """
        self.check(lease)
        self.free(lease.name)
        self._put(lease)

    def check(self, lease: Lease) -> None:
        """Check whether a lease can have its GPUs.

        Raises:
            StateError: another job holds one of them, or two hosts of the lease are one machine, so that the lease
                would hold a GPU twice.
        """
        _refuse_twice(lease)
        for machine, gpu, host in _gpus_of(lease):
            for key in (machine, _nameless(host)):
                holder = self._machines.get(key, {}).get(gpu)
                if holder is not None and holder.how != "promised" and holder != _holder_of(lease):
                    raise StateError(
                        f"GPU {gpu} is {holder.how} to {holder.job} already, so {lease.job} cannot have this GPU",
                        host=host,
                        hint="gpurun granted no GPUs; `gpurun status` shows which job holds which GPUs",
                    )  # fmt: skip

    def free(self, name: str) -> None:
        """Remove a lease."""
        lease = self._leases.pop(name, None)
        for machine, gpu, _ in _gpus_of(lease) if lease is not None else ():
            self._machines[machine].pop(gpu, None)

    def promise(self, job: str, grants: Iterable[Grant], inventory: Inventory, *, how: str = "promised") -> None:
        """Promise free GPUs to a job."""
        for grant in grants:
            host = inventory.by_name.get(grant.host)
            if host is not None:
                held = self._machines.setdefault(host.machine, {})
                for gpu in grant.gpus:
                    held.setdefault(gpu, Holder(job, how))

    def _put(self, lease: Lease) -> None:
        self._leases[lease.name] = lease
        for machine, gpu, _ in _gpus_of(lease):
            self._machines.setdefault(machine, {})[gpu] = _holder_of(lease)

    def _note_overlap(self, lease: Lease) -> None:
        for machine, gpu, host in _gpus_of(lease):
            holder = self._machines.get(machine, {}).get(gpu)
            if holder is not None and holder.job != lease.job:
                self.overlaps.append(
                    StateError(
                        f"the jobs {holder.job} and {lease.job} both hold GPU {gpu}", host=host,
                        hint=f"cancel one of the jobs; `gpurun doctor {host}` shows for which job the host "
                             "reserves the GPU",
                    )
                )  # fmt: skip
                return


def _refuse_twice(lease: Lease) -> None:
    """Refuse a lease that holds one GPU twice, under two names of its machine."""
    names: dict[tuple[str, int], str] = {}
    for machine, gpu, host in _gpus_of(lease):
        other = names.setdefault((machine, gpu), host)
        if other != host:
            raise StateError(
                f"{other} and {host} are two names of one machine, {lease.machines.get(host, machine)}; "
                f"{lease.job} cannot have GPU {gpu} of this machine twice",
                where=lease.inventory, hint="give the machine one name in the inventory",
            )  # fmt: skip


def _holder_of(lease: Lease) -> Holder:
    return Holder(lease.job, "lost" if lease.lost else "leased", lease.owner)


def _nameless(host: str) -> str:
    """Return a placeholder machine for a host of an older version's lease, which does not name the machine."""
    return f"{host}/"


def _called(machine_id: str) -> str:
    """Return the key of a machine by what it calls itself; no address is written so."""
    return f"{CALLED}{machine_id}"


def _gpus_of(lease: Lease) -> Iterable[tuple[str, int, str]]:
    """Yield machine, GPU and host name of each GPU of a lease, for each key of the machine: its address, its id if the
    lease says it, and two keys if the lease does not say the address.
    """
    for grant in lease.grants:
        known, machine_id = lease.machines.get(grant.host), lease.ids.get(grant.host)
        machines = (known,) if known else (machine_at(grant.host), _nameless(grant.host))
        for machine in (*machines, _called(machine_id)) if machine_id else machines:
            for gpu in grant.gpus:
                yield machine, gpu, grant.host
