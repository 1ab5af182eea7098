"""By what gpurun knows the machines of an inventory's hosts, and those of a lease's hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import Grant
from gpurun.leases.lease import Lease
from gpurun.state.known_as import KnownAs
from gpurun.state.machines import Machine


def known_hosts(inventory: Inventory, machines: Mapping[str, Machine]) -> dict[str, KnownAs]:
    """Return host → by what its machine is known.

    An id that several hosts of the inventory give says nothing: they were installed from one image.

    Args:
        machines: what this user knows of machines (`gpurun.state.machines.read_machines`).
    """
    known = [
        KnownAs(host.name, host.machine, machines[host.machine].id if host.machine in machines else "")
        for host in inventory.hosts
    ]
    times = Counter(each.id for each in known) if machines else {}
    return {each.host: each if not each.id or times[each.id] == 1 else replace(each, id="") for each in known}


def lease_hosts(lease: Lease) -> list[KnownAs]:
    """Return by what the machines of a lease's hosts were known at the grant."""
    return [KnownAs(grant.host, lease.machines.get(grant.host, ""), lease.ids.get(grant.host, ""))
            for grant in lease.grants]  # fmt: skip


def ids_of(inventory: Inventory, grants: Iterable[Grant], machines: Mapping[str, Machine]) -> dict[str, str]:
    """Return host → the id of its machine, for the hosts of some grants whose id is known."""
    known = known_hosts(inventory, machines)
    return {grant.host: known[grant.host].id for grant in grants if known[grant.host].id}
