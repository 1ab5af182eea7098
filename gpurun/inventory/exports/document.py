"""An inventory as one JSON document: all its values, with defaults applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpurun.inventory.model import Host, Inventory


def document(inventory: Inventory, hosts: Sequence[Host]) -> dict[str, Any]:
    """Return the document; it contains only the racks of these hosts."""
    chosen = {host.name for host in hosts}
    racks = {rack.name: [name for name in rack.hosts if name in chosen] for rack in inventory.racks}
    return {
        "version": 1,
        "hosts": [{**vars(host), "labels": dict(host.labels)} for host in hosts],
        "racks": {name: members for name, members in racks.items() if members},
        "fabrics": {name: {**vars(f), "kind": f.kind.value} for name, f in inventory.fabrics.items()},
        "pools": {pool.name: vars(pool) for pool in inventory.pools},
        "ssh_config": inventory.ssh_config,
        "docker_host": inventory.docker_host,
        "outputs_limit_mib": inventory.outputs_limit_mib,
    }
