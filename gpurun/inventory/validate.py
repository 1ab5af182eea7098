"""Convert YAML nodes to an Inventory and report every error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from yaml.nodes import Node

from gpurun.documents.convert import Entries, ProblemReport, entries, mapping, refuse_unknown, value
from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory import fields
from gpurun.inventory.fields import is_address
from gpurun.inventory.hostset import MAX_HOSTS, expand
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Pool, Rack, contradictions
from gpurun.quantities import count

_NEEDED = ("gpus", "generation", "fabric")


def inventory(root: Node, report: ProblemReport, source: Path) -> Inventory:
    """Return the inventory of a document. It is valid only if the report then has no problems."""
    top = entries(root, report, "the inventory")
    named = {key: pair for key, pair in top.items() if not key.startswith("x-")}
    refuse_unknown(named, fields.TOP, report, "the inventory", below={"defaults": fields.HOST})
    if "version" in top:
        value(top["version"][1], fields.VERSION, report, "version")
    else:
        report.wrong(root, "version is missing", allowed=("version: 1",))
    fabrics = _fabrics(top, report)
    racks, hosts = _Racks(fabrics, report).read(top)
    head = mapping(top["head"][1], fields.HEAD, report, "head") if "head" in top else {}
    return Inventory(
        hosts=tuple(hosts),
        racks=tuple(racks),
        fabrics=fabrics,
        pools=_pools(top, report, sum(host.gpus for host in hosts)),
        ssh_config=_ssh_config(top, report, source),
        docker_host=head.get("docker_host"),
        outputs_limit_mib=head.get("outputs_limit"),
        source=str(source),
    )


def _named(top: Entries, section: str, report: ProblemReport) -> Iterable[tuple[str, Node, Node]]:
    """Return the entries of a section whose keys are user-defined names: name, key node, value node."""
    if section not in top:
        return
    for name, (key, node) in entries(top[section][1], report, section).items():
        value(key, fields.NAME, report, f"name in {section}")
        yield name, key, node


def _fabrics(top: Entries, report: ProblemReport) -> dict[str, Fabric]:
    fabrics: dict[str, Fabric] = {}
    for name, key, node in _named(top, "fabrics", report):
        values = mapping(node, fields.FABRIC, report, f"fabric {name}")
        missing = [needed for needed in fields.FABRIC_NEEDS if needed not in values]
        if missing:
            report.wrong(key, f"fabric {name} has no {' and no '.join(missing)}")
        if None in (values.get("kind"), values.get("interface")):
            fabrics[name] = Fabric(name, FabricKind.TCP, "")  # the reported error prevents its use
            continue
        if values["kind"] is FabricKind.TCP and values.get("hcas"):
            report.wrong(
                key, f"fabric {name} has hcas, but its kind is tcp, which has no hcas", allowed=("roce", "infiniband")
            )
        fabrics[name] = Fabric(name=name, **values)
    return fabrics


_POOL_FIELDS = {"idle_timeout": "idle_timeout_s", "idle_grace": "idle_grace_s"}
"""The field of a pool's key, where their names differ."""


def _pools(top: Entries, report: ProblemReport, total_gpus: int) -> tuple[Pool, ...]:
    before = len(report.problems)
    found: dict[str, tuple[Node, Pool]] = {}
    for name, key, node in _named(top, "pools", report):
        values = mapping(node, fields.POOL, report, f"pool {name}")
        found[name] = (key, Pool(name=name, **{_POOL_FIELDS.get(key, key): value for key, value in values.items()}))
    pools = tuple(pool for _, pool in found.values())
    for wrong in contradictions(pools, total_gpus) if len(report.problems) == before else ():
        node = top["pools"][0] if wrong.pool is None else found[wrong.pool][0]
        report.wrong(node, wrong.message, allowed=wrong.allowed)
    return pools


def _ssh_config(top: Entries, report: ProblemReport, source: Path) -> str | None:
    if "ssh_config" not in top:
        return None
    text = value(top["ssh_config"][1], fields.SSH_CONFIG, report, "ssh_config")
    return None if text is None else os.path.normpath(source.parent / Path(str(text)).expanduser())


class _Racks:
    """Reads racks and hosts; keeps inherited values, and the line where each name first appears."""

    def __init__(self, fabrics: Mapping[str, Fabric], report: ProblemReport) -> None:
        self._fabrics = fabrics
        self._report = report
        self._lines: dict[str, int] = {}
        self._machines: dict[str, str] = {}
        self._hosts: list[Host] = []

    def read(self, top: Entries) -> tuple[list[Rack], list[Host]]:
        base: dict[str, Any] = {}
        if len(self._fabrics) == 1:
            base["fabric"] = next(iter(self._fabrics))
        if "defaults" in top:
            base = self._inherited(base, top["defaults"][1], "defaults")
        racks = []
        for name, _, node in _named(top, "racks", self._report):
            parts = entries(node, self._report, f"rack {name}")
            refuse_unknown(parts, fields.RACK, self._report, f"rack {name}", below={"defaults": fields.HOST})
            own = (
                self._inherited(base, parts["defaults"][1], f"defaults of rack {name}") if "defaults" in parts else base
            )
            before = len(self._hosts)
            if "hosts" in parts:
                self._rack(name, parts["hosts"][1], own)
            racks.append(Rack(name, tuple(host.name for host in self._hosts[before:])))
        return racks, self._hosts

    def _inherited(self, base: Mapping[str, Any], node: Node, where: str) -> dict[str, Any]:
        values = mapping(node, fields.HOST, self._report, where)
        for key in fields.PER_HOST:
            if key in values:
                self._report.wrong(node, f"give {key} at each host, not in {where}")
        return _merged(base, values)

    def _rack(self, rack: str, node: Node, base: Mapping[str, Any]) -> None:
        for folded, (key, own) in entries(node, self._report, f"hosts of rack {rack}").items():
            try:
                names = expand(folded)
            except BadInput as error:
                self._report.wrong(key, error.message)
                continue
            values = _merged(base, mapping(own, fields.HOST, self._report, f"host {folded}"))
            if self._complete(folded, values, key):
                self._add(rack, names, values, key)

    def _complete(self, folded: str, values: Mapping[str, Any], key: Node) -> bool:
        """Return True if a host has all required values and they are consistent; report the errors."""
        good = True
        for needed in _NEEDED:
            if needed not in values:
                self._report.wrong(
                    key,
                    f"host {folded} has no {needed}; add {needed} to the host or to `defaults`",
                )
                good = False
        fabric = values.get("fabric")
        if fabric is not None and fabric not in self._fabrics:
            allowed = tuple(self._fabrics) or ("none, because the inventory defines no fabrics",)
            self._report.wrong(key, f"host {folded}: there is no fabric {shown(fabric)}", allowed=allowed)
            good = False
        gpus = values.get("gpus")
        if good and gpus is not None and ("near_hca" in values or "nvlink" in values):
            self._indices(folded, values, gpus, key)
        return good and None not in (gpus, values.get("generation"), fabric)

    def _indices(self, folded: str, values: Mapping[str, Any], gpus: int, key: Node) -> None:
        linked = [index for group in values.get("nvlink") or () for index in group]
        for name, indices in (("nvlink", linked), ("near_hca", values.get("near_hca") or ())):
            beyond = [index for index in indices if index >= gpus]
            if beyond:
                self._report.wrong(
                    key, f"host {folded}: {name} names GPU {beyond[0]}, but the host has {gpus}, counted from 0"
                )
            if len(set(indices)) < len(indices):
                self._report.wrong(key, f"host {folded}: {name} names a GPU twice")

    def _add(self, rack: str, names: tuple[str, ...], values: dict[str, Any], key: Node) -> None:
        line = key.start_mark.line + 1
        own = self._per_host(names, values, key)
        if len(self._hosts) + len(names) > MAX_HOSTS:
            self._report.wrong(key, f"the inventory has more than {MAX_HOSTS} hosts")
            return
        for position, name in enumerate(names):
            if name in self._lines:
                self._report.wrong(key, f"host {name} is in the inventory twice; first on line {self._lines[name]}")
                continue
            self._lines[name] = line
            if own:
                values.update({field: addresses[position] for field, addresses in own.items()})
            host = Host(name=name, rack=rack, **values)
            one_each = len(names) == 1 or "address" not in values or "address" in own  # else validate has reported that
            first = self._machines.setdefault(host.machine, name)
            if first != name and one_each:
                where = f"one machine, {host.machine}, so gpurun would grant its GPUs twice"
                self._report.wrong(key, f"hosts {first} and {name} are {where}")
            self._hosts.append(host)

    def _per_host(self, names: tuple[str, ...], values: dict[str, Any], key: Node) -> dict[str, tuple[str, ...]]:
        """Return the addresses of a range of hosts, one per host."""
        own: dict[str, tuple[str, ...]] = {}
        for field in fields.PER_HOST:
            text = values.get(field)
            if text is None or (len(names) == 1 and is_address(text)):
                continue
            try:
                addresses = expand(text)
            except BadInput as error:
                self._report.wrong(key, f"{field}: {error.message}")
                continue
            if len(addresses) != len(names):
                given = count(len(addresses), "address", "addresses")
                self._report.wrong(key, f"{field} {shown(text)} gives {given} for {count(len(names), 'host')}")
                continue
            own[field] = addresses
        return own


def _merged(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inherited values, overridden by the host's own values; labels are merged name by name."""
    merged = {**base, **values}
    if "labels" in base and "labels" in values:
        merged["labels"] = {**base["labels"], **values["labels"]}
    return merged
