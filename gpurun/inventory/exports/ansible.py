"""An Ansible inventory in YAML: racks and generations as groups, fields as variables."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ruamel.yaml import YAML

from gpurun.inventory.model import Host

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
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump({"all": {"hosts": everyone, "children": groups}}, stream)
    return stream.getvalue()


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
