"""The status of a lab, read from the kernel without changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gpurun.lab import folder, hardware, host, network, record
from gpurun.lab.paths import HostFolder, lab_folder
from gpurun.lab.process import ProcessId
from gpurun.lab.spec import HEAD, LabHost, fabric_netns, hosts_of

State = Literal["up", "starting", "cut", "off"]


@dataclass(frozen=True)
class HostStatus:
    """One host.

    Attributes:
        state: ``up``: sshd and dockerd answer; ``cut``: they answer, but the link is cut; ``starting``: they do not
            answer yet; ``off``: the host has no process.
        pid: of its process 1, as the machine numbers it.
        memory_mib: memory of its own processes, with their part of shared pages (PSS).
        hardware: folder with its GPUs' state, sysfs tree and kernel log, in which to inject faults.
        sysfs: its sysfs tree, as a path on the machine.
        to_bytes, from_bytes: traffic of its link since the host started.
    """

    name: str
    rack: str
    address: str
    state: State
    gpus: int
    generation: str
    pid: int | None
    memory_mib: float
    hardware: str
    sysfs: str
    to_bytes: int
    from_bytes: int


@dataclass(frozen=True)
class LabStatus:
    """A whole lab.

    Attributes:
        state: ``up``, ``half up`` (an ``up`` that did not finish), ``down``.
        head_state: ``up`` or ``cut``.
        uplinks: bytes to and from each rack over its uplink since the lab came up.
    """

    name: str
    state: Literal["up", "half up", "down"]
    folder: str
    inventory: str | None = None
    ssh_config: str | None = None
    subnet: str | None = None
    head_address: str | None = None
    head_state: Literal["up", "cut"] | None = None
    hosts: tuple[HostStatus, ...] = ()
    uplinks: Mapping[str, network.Traffic] | None = None
    head: network.Traffic | None = None

    def to_json(self) -> dict[str, object]:
        """Return the status as plain JSON values."""
        return asdict(self)


def status_of(lab: str) -> LabStatus:
    """Return the status of this lab from the kernel. A lab that is not up is ``down``, which is not an error."""
    known = record.load(lab)
    if known is None or not network.exists(fabric_netns(lab)):
        return LabStatus(name=lab, state="down" if known is None else "half up", folder=str(lab_folder(lab)))
    plugged, bytes_of = network.ports_up(lab), network.traffic(lab)
    hosts = hosts_of(known.spec, known.subnet)
    return LabStatus(
        name=lab,
        state="up" if known.complete else "half up",
        folder=str(known.folder),
        inventory=str(known.folder / folder.INVENTORY),
        ssh_config=str(known.folder / folder.SSH_CONFIG),
        subnet=str(known.subnet),
        head_address=str(known.subnet[1]),
        head_state="up" if HEAD in plugged else "cut",
        hosts=tuple(_host(lab, known.folder, each, plugged, bytes_of) for each in hosts),
        uplinks={rack: bytes_of[f"{rack}-up"] for rack in dict.fromkeys(each.rack for each in hosts)},
        head=bytes_of[HEAD],
    )


def _host(
    lab: str, place: Path, each: LabHost, plugged: frozenset[str], bytes_of: Mapping[str, network.Traffic]
) -> HostStatus:
    init = ProcessId.load(record.init_record(lab, each.name))
    init = init if init is not None and init.alive() else None
    own = HostFolder(place / "hosts" / each.name).hardware
    traffic = bytes_of.get(each.name, network.Traffic(0, 0))
    return HostStatus(
        name=each.name,
        rack=each.rack,
        address=str(each.address),
        state=_state(init, each, plugged),
        gpus=each.gpus,
        generation=each.generation,
        pid=init.pid if init else None,
        memory_mib=round(host.memory_mib(each.netns), 1),
        hardware=str(own),
        sysfs=str(own / hardware.SYSFS),
        to_bytes=traffic.to_bytes,
        from_bytes=traffic.from_bytes,
    )


def _state(init: ProcessId | None, each: LabHost, plugged: frozenset[str]) -> State:
    if init is None:
        return "off"
    if not host.is_ready(init):
        return "starting"
    return "up" if each.name in plugged else "cut"
