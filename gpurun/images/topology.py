"""Facts of the inventory for transfers between hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpurun.images.seats import Options

if TYPE_CHECKING:
    from gpurun.inventory.model import Fabric, Inventory


def rack_of(inventory: Inventory | None, host: str) -> str:
    """Return a host's rack. All hosts that the inventory does not know share one."""
    known = inventory.by_name.get(host) if inventory else None
    return known.rack if known else ""


def fabrics_of(inventory: Inventory | None, hosts: Iterable[str]) -> list[Fabric]:
    """Return the fabrics of hosts that the inventory knows."""
    if inventory is None:
        return []
    return [inventory.fabric_of(inventory.by_name[host]) for host in hosts if host in inventory.by_name]


def options_for(inventory: Inventory | None, hosts: Iterable[str], rate_bytes_s: float | None = None) -> Options:
    """Return where each host listens: at its fabric address, else on its fabric's interface."""
    known = [inventory.by_name[host] for host in hosts if host in inventory.by_name] if inventory else []
    return Options(
        rate_bytes_s=rate_bytes_s,
        interfaces={host.name: inventory.fabric_of(host).interface for host in known} if inventory else {},
        addresses={host.name: host.fabric_address for host in known if host.fabric_address},
    )


def host_to_host(inventory: Inventory | None, hosts: Iterable[str]) -> bool:
    """Return whether all these hosts may open connections to each other."""
    return all(fabric.host_to_host for fabric in fabrics_of(inventory, hosts))


def lanes(inventory: Inventory | None, hosts: Iterable[str]) -> int:
    """Return the number of parallel chains: the lowest that a fabric of the hosts allows."""
    return max(1, min((fabric.chains for fabric in fabrics_of(inventory, hosts)), default=1))
