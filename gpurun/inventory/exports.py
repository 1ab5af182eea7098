"""Exports of an inventory for other tools: Ansible, hostfiles, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from gpurun.inventory.model import Host, Inventory

EXPORTS = ("ansible", "hostfile", "deepspeed", "json")

# An inventory as one JSON document: all its values, with defaults applied.


def inventory_document(inventory: Inventory, hosts: Sequence[Host]) -> dict[str, Any]:
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


# Hostfiles of Open MPI and DeepSpeed, with one slot per GPU.


def openmpi(hosts: Iterable[Host]) -> str:
    """Return one line ``HOST slots=N max_slots=N`` per host. Source: Open MPI's mpirun(1)."""
    return "".join(f"{host.name} slots={host.gpus} max_slots={host.gpus}\n" for host in hosts if host.gpus)


def deepspeed(hosts: Iterable[Host]) -> str:
    """Return one line ``HOST slots=N`` per host. Source: DeepSpeed's "Resource Configuration (multi-node)"."""
    return "".join(f"{host.name} slots={host.gpus}\n" for host in hosts if host.gpus)


# An Ansible inventory in YAML: racks and generations as groups, fields as variables.


_ANSIBLE = {"address": "ansible_host", "port": "ansible_port", "user": "ansible_user",
            "python": "ansible_python_interpreter"}  # fmt: skip
_ELSEWHERE = ("name", "rack", "generation", "labels")


def ansible(hosts: Sequence[Host]) -> str:
    """Return the text of the inventory."""
    everyone = {host.name: _variables(host) for host in hosts}
    groups: dict[str, dict[str, dict[str, None]]] = {}
    for host in hosts:
        for group in (f"rack_{_word(host.rack)}", f"generation_{_word(host.generation)}"):
            groups.setdefault(group, {"hosts": {}})["hosts"][host.name] = None
    document = {"all": {"hosts": everyone, "children": groups}}
    return yaml.dump(document, Dumper=_AnsibleDumper, sort_keys=False, allow_unicode=True)


class _AnsibleDumper(yaml.SafeDumper):
    """Writes a host without values as people do: ``gpu-r1-01:``."""


_AnsibleDumper.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", ""))


def _word(name: str) -> str:
    """Return a valid group name: letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in name)


def _plain(value: object) -> object:
    """Convert tuples to lists, because YAML has no tuples."""
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _variables(host: Host) -> dict[str, object]:
    found: dict[str, object] = {}
    for field, value in vars(host).items():
        if field not in _ELSEWHERE and value is not None and value != ():
            found[_ANSIBLE.get(field, field)] = _plain(value)
    found["rack"] = host.rack
    found["generation"] = host.generation
    if host.labels:
        found["labels"] = dict(host.labels)
    return found
