"""Import the machines of SkyPilot's ``ssh_node_pools.yaml`` and of dstack's SSH fleets.

Both list hosts by address, with the user and the key of all of them, which a host may override. Neither says how many
GPUs a host has. The pool or the fleet becomes a label. Sources: SkyPilot's "Using Existing Machines", dstack's
"SSH fleets" and the reference of ``.dstack.yml``.
"""

from __future__ import annotations

from collections.abc import Mapping

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.nodes import Entries, ProblemReport, compose, entries, is_null
from gpurun.documents.problems import DocumentError
from gpurun.errors import BadInput
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.imports.jumps import IS_JUMP
from gpurun.quantities.counts import count

_NAMES = ("ip", "hostname")
_VALUES = {"user": "user", "port": "port", "internal_ip": "fabric_address"}
_KEYS = ("identity_file", "ssh_key", "private_key")
_BY_SSH = "gpurun takes SSH settings from ~/.ssh/config"
_SECRETS = ("password", "ssh_key", "private_key")


def kind_of(data: bytes, file: str) -> str | None:
    """Return ``skypilot`` or ``dstack`` if a YAML file has that form."""
    try:
        root = compose(data, file, tags=True)
        top = entries(root, ProblemReport(file), file) if isinstance(root, MappingNode) else {}
    except DocumentError:
        return None
    if _text(top, "type") is not None:
        return "dstack"
    pools = [entries(pool, ProblemReport(file), file) for _, pool in top.values()]
    listed = [isinstance(pool["hosts"][1], SequenceNode) for pool in pools if "hosts" in pool]
    return "skypilot" if any(listed) else None


def read_skypilot(data: bytes, draft: Draft, file: str) -> None:
    """Fill a draft from ``ssh_node_pools.yaml``."""
    reader = _MachineLists(draft, file)
    pools = reader.top(data, "the pools")
    for name, (place, node) in pools.items():
        pool = entries(node, reader.report, f"pool {name}")
        if "hosts" not in pool:
            reader.report.wrong(place, f"pool {name} has no hosts")
        reader.hosts(pool, {"pool": name})
    reader.finish(f"{count(len(pools), 'pool')} as labels")


def read_dstack(data: bytes, draft: Draft, file: str) -> None:
    """Fill a draft from an SSH fleet. Raises BadInput: another configuration of dstack's, or a fleet without hosts."""
    reader = _MachineLists(draft, file)
    top = reader.top(data, "the fleet")
    if _text(top, "type") != "fleet":
        raise BadInput(
            f"a dstack file of type {_text(top, 'type')!r} lists no hosts; import a file of type fleet", where=file
        )
    ssh = entries(top["ssh_config"][1], reader.report, "ssh_config") if "ssh_config" in top else {}
    if "hosts" not in ssh:
        raise BadInput("the dstack fleet has no ssh_config with hosts; gpurun imports only SSH fleets", where=file)
    for key in ("placement", "resources", "blocks", "env"):
        if key in top:
            draft.leave(f"{key}: only dstack has this setting", reader.place(top[key][0]))
    name = _text(top, "name")
    reader.hosts(ssh, {"fleet": name} if name else {})
    reader.finish("")


class _MachineLists:
    """Reads hosts into a draft, and collects the problems of the file."""

    def __init__(self, draft: Draft, file: str) -> None:
        self.report = ProblemReport(file)
        self._draft, self._file = draft, file
        self._jumps: set[str] = set()

    def top(self, data: bytes, what: str) -> Entries:
        root = compose(data, self._file, tags=True)
        return {} if root is None else entries(root, self.report, what)

    def place(self, node: Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}"

    def hosts(self, common: Entries, labels: Mapping[str, str]) -> None:
        """Add the hosts of a list; `common` are the values of all of them."""
        if "hosts" not in common:
            return
        listed = common["hosts"][1]
        if not isinstance(listed, SequenceNode):
            self.report.wrong(listed, "hosts must be a list")
            return
        for node in listed.value:
            own: Entries = {}
            if not isinstance(node, ScalarNode):
                own = entries(node, self.report, "a host")
            name = node.value if isinstance(node, ScalarNode) else self._name(node, own)
            if name is None:
                continue
            where = self.place(node)
            if self._draft.host(name, where):
                for label, text in labels.items():
                    self._draft.label(name, label, text, where)
                for key, (place, value) in {**common, **own}.items():
                    self._value(name, key, place, value)

    def _name(self, node: Node, own: Entries) -> str | None:
        name = next((text for key in _NAMES if (text := _text(own, key)) is not None), None)
        if name is None:
            self.report.wrong(node, "the host has neither ip nor hostname")
        return name

    def _value(self, host: str, key: str, place: ScalarNode, value: Node) -> None:
        where = self.place(place)
        if key in (*_NAMES, "hosts"):
            return
        if key in _VALUES and isinstance(value, ScalarNode):
            if not is_null(value):
                self._draft.put(host, _VALUES[key], value.value, where)
        elif key == "proxy_jump":
            found = entries(value, self.report, key) if isinstance(value, MappingNode) else {key: (place, value)}
            self._jumps.add(_text(found, "hostname") or _text(found, key) or "")
            self._draft.leave(f"proxy_jump: {_BY_SSH}", where)
        elif key in _SECRETS:
            self._draft.leave(f"{key}: a secret", where)
        elif key in _KEYS:
            self._draft.leave(f"{key}: {_BY_SSH}", where)
        else:
            self._draft.leave(f"{key}: gpurun's inventory has no such key for hosts", where)

    def finish(self, took: str) -> None:
        self.report.raise_if_any()
        self._draft.leave_out([host for host in self._draft.values if host in self._jumps], IS_JUMP, self._file)
        self._draft.took.append(count(len(self._draft.values), "host") + (f", {took}" if took else ""))


def _text(found: Entries, key: str) -> str | None:
    node = found[key][1] if key in found else None
    return node.value if isinstance(node, ScalarNode) and not is_null(node) else None
