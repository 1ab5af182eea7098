"""The options and the hosts of a lab, as frozen values. Nothing here changes the machine."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network
from itertools import groupby
from pathlib import Path
from typing import Any

from gpurun.errors import BadInput
from gpurun.lab.process import lab_alone

# GPU models by generation, as NVML describes them (NVIDIA's data sheets; names as ``nvidia-smi -L`` prints).


@dataclass(frozen=True)
class GpuModel:
    """The properties that all GPUs of a model share.

    Attributes:
        pci_device: PCI device id, as in pci.ids.
        architecture: NVML's number, ``NVML_DEVICE_ARCH_*`` in nvml.h.
        capability: CUDA compute capability, major and minor.
        links: NVLink links per GPU; 0 = no NVLink.
        link_version: NVLink generation.
        numa_nodes: CPU sockets of the usual machine for this model.
        power_limit_w: board power.
        sm_mhz: clock of its cores under load.
        pcie_generation: of its link to the host.
    """

    name: str
    pci_device: int
    architecture: int
    capability: tuple[int, int]
    memory_mib: int
    links: int
    link_version: int
    numa_nodes: int
    power_limit_w: int
    driver: str
    cuda: int
    sm_mhz: int
    pcie_generation: int


MODELS = {
    "pascal": GpuModel("Tesla P100-SXM2-16GB", 0x15F9, 4, (6, 0), 16384, 4, 1, 2, 300, "535.183.06", 12020, 1480, 3),
    "volta": GpuModel("Tesla V100-SXM2-32GB", 0x1DB5, 5, (7, 0), 32768, 6, 2, 2, 300, "535.183.06", 12020, 1530, 3),
    "turing": GpuModel("Tesla T4", 0x1EB8, 6, (7, 5), 15360, 0, 0, 1, 70, "535.183.06", 12020, 1590, 3),
    "ampere": GpuModel("NVIDIA A100-SXM4-80GB", 0x20B2, 7, (8, 0), 81920, 12, 3, 2, 400, "550.127.08", 12040, 1410, 4),
    "hopper": GpuModel("NVIDIA H100 80GB HBM3", 0x2330, 9, (9, 0), 81559, 18, 4, 2, 700, "550.127.08", 12040, 1980, 5),
    "blackwell": GpuModel("NVIDIA B200", 0x2901, 10, (10, 0), 183359, 18, 5, 2, 1000, "570.124.06", 12080, 1965, 5),
}


# Topology of a host's GPUs: PCI addresses, NUMA nodes, and NVLink connections.


SWITCH = "switch"

_FULL_MESH_MOST = 4  # without a switch (before NVLink 3), at most four GPUs are fully connected
_SWITCHED_SINCE = 3
_FIRST_BUS = 0x1A
_BUS_STEP = 0x0D


def bus(index: int) -> int:
    """Return the PCI bus number of a GPU: 1a, 27, 34, … so that sixteen GPUs fit."""
    return _FIRST_BUS + index * _BUS_STEP


def pci_address(index: int) -> str:
    """Return the PCI address in the kernel's format: ``0000:1a:00.0``."""
    return f"0000:{bus(index):02x}:00.0"


def numa_node(model: GpuModel, index: int, gpus: int) -> int:
    """Return the NUMA node of a GPU: node 0 for the first half of the GPUs, node 1 for the rest."""
    return index * model.numa_nodes // gpus if gpus > 1 else 0


def nvlink_groups(model: GpuModel, gpus: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of GPUs that NVLink connects fully: all GPUs behind a switch, otherwise groups of four."""
    if model.links == 0 or gpus < 2:
        return ()
    size = gpus if model.link_version >= _SWITCHED_SINCE else _FULL_MESH_MOST
    groups = (tuple(range(first, min(first + size, gpus))) for first in range(0, gpus, size))
    return tuple(group for group in groups if len(group) > 1)


def link_ends(model: GpuModel, index: int, gpus: int) -> tuple[str, ...]:
    """Return the end of each NVLink link of a GPU: ``switch``, or a peer's index, distributed evenly over the peers."""
    for group in nvlink_groups(model, gpus):
        if index in group:
            if model.link_version >= _SWITCHED_SINCE:
                return (SWITCH,) * model.links
            peers = [str(peer) for peer in group if peer != index]
            used = model.links // len(peers) * len(peers) or min(model.links, len(peers))
            return tuple(peers[link % len(peers)] for link in range(used))
    return ()


MOST_HOSTS = 240
MOST_GPUS = 16
HEAD = "head"
FABRICS = ("tcp", "roce")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?")
_SMALLEST_DISK_MIB = 64
_FIRST_HOST = 11  # the address of host number 0 within the lab's /24; .1 is the head


@dataclass(frozen=True)
class LabSpec:
    """The options of ``gpurun lab up``.

    Attributes:
        hosts: hosts per rack.
        gpus: GPUs per host.
        generation: GPU generation of each rack; the last one also applies to all further racks.
        host_link_bps, rack_uplink_bps: link rates, bits per second, each direction.
        fabric: the hosts' fabric in the inventory that the lab writes.
        disk_mib: size of each host's own disk; None = the machine's file system, unlimited.
        resolve_names: each host's ``/etc/hosts`` contains the other hosts (False: a fault for doctor to find).
    """

    name: str = "default"
    racks: int = 2
    hosts: int = 2
    gpus: int = 4
    generation: tuple[str, ...] = ("pascal",)
    host_link_bps: int = 10_000_000_000
    rack_uplink_bps: int = 2_500_000_000
    fabric: str = "tcp"
    disk_mib: int | None = None
    resolve_names: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_count("--racks", self.racks, MOST_HOSTS)
        _check_count("--hosts", self.hosts, MOST_HOSTS // self.racks)
        _check_count("--gpus", self.gpus, MOST_GPUS)
        for generation in self.generation:
            if generation not in MODELS:
                raise BadInput(
                    f"unknown GPU generation {generation!r}", hint=f"choose from: {', '.join(sorted(MODELS))}"
                )
        if self.disk_mib is not None and self.disk_mib < _SMALLEST_DISK_MIB:
            raise BadInput(f"a disk of {self.disk_mib} MiB is too small", hint=f"give {_SMALLEST_DISK_MIB}MiB or more")
        if self.fabric not in FABRICS:
            raise BadInput(f"unknown fabric {self.fabric!r}", hint=f"choose from: {', '.join(FABRICS)}")

    def to_json(self) -> dict[str, object]:
        """Return the options as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LabSpec:
        """Return the options from the values of `to_json`."""
        known = dict(fields)
        known["generation"] = tuple(known["generation"])
        return cls(**known)


@dataclass(frozen=True)
class LabHost:
    """One host of a lab, with its name, address and namespace.

    Attributes:
        number: counted through the whole lab, from 0.
        netns: name of its network namespace, as ``ip netns`` lists it.
    """

    name: str
    rack: str
    number: int
    address: IPv4Address
    generation: str
    gpus: int
    netns: str


def check_name(name: str) -> None:
    """Refuse lab names that are not valid in the name of a namespace, cgroup or folder."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} is not a valid name for a lab",
            hint="use up to 30 lower-case letters, digits and dashes, such as my-lab",
        )


def racks_of(spec: LabSpec) -> tuple[str, ...]:
    """Return the names of the racks: r1, r2, …"""
    return tuple(f"r{number}" for number in range(1, spec.racks + 1))


def hosts_of(spec: LabSpec, subnet: IPv4Network) -> tuple[LabHost, ...]:
    """Return all hosts, rack by rack: gpu-r1-01, gpu-r1-02, …"""
    return tuple(
        LabHost(
            name=(name := f"gpu-{rack}-{place + 1:02d}"),
            rack=rack,
            number=(number := index * spec.hosts + place),
            address=subnet[_FIRST_HOST + number],
            generation=spec.generation[min(index, len(spec.generation) - 1)],
            gpus=spec.gpus,
            netns=netns_of(spec.name, name),
        )
        for index, rack in enumerate(racks_of(spec))
        for place in range(spec.hosts)
    )


def netns_prefix(lab: str) -> str:
    """Return the prefix of a lab's network namespaces. It is unique, because no lab's name contains its dot."""
    return f"gpurun.{lab}."


def netns_of(lab: str, host: str) -> str:
    """Return a host's network namespace."""
    return netns_prefix(lab) + host


def fabric_netns(lab: str) -> str:
    """Return the network namespace of a lab's bridges."""
    return f"{netns_prefix(lab)}fabric"


def _check_count(option: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise BadInput(f"{option} is {count}, but must be between 1 and {most}", hint="choose a number in this range")


# The folders of labs.


_UNUSABLE = frozenset(',"\n\r')
RUNTIME = Path("/run/gpurun-lab")


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return gpurun's cache folder: ``$XDG_CACHE_HOME/gpurun``, otherwise ``~/.cache/gpurun``."""
    base = environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpurun"
    if _UNUSABLE & set(str(folder)):
        raise BadInput(
            f"Docker and OpenSSH cannot use a folder with a comma, a double quote or a line break: {str(folder)!r}",
            hint="set XDG_CACHE_HOME to another folder",
        )
    return folder


def engine_folder() -> Path:
    """Return the folder of the head's own Docker engine."""
    return cache() / "engine"


def lab_folder(name: str) -> Path:
    """Return the folder of one lab: inventory, ssh configuration, keys, and the hosts' disks."""
    return cache() / "lab" / name


@dataclass(frozen=True)
class HostFolder:
    """The folder of one host, ``LAB/hosts/HOST``: its disk and key stay when the host is off."""

    path: Path

    @property
    def disk(self) -> Path:
        """The host's disk, or the mount point of its image."""
        return self.path / "disk"

    @property
    def image(self) -> Path:
        """The host's disk as one file, if the disk has a size."""
        return self.path / "disk.img"

    @property
    def hardware(self) -> Path:
        """``/run/gpurun-lab`` of the host: GPUs, sysfs, kernel log."""
        return self.path / "hardware"

    @property
    def key(self) -> Path:
        """Private host key."""
        return self.path / "ssh_host_ed25519_key"

    @property
    def boot_file(self) -> Path:
        """The instructions for its process 1."""
        return self.path / "boot.json"

    @property
    def log(self) -> Path:
        """The output of its process 1; the services' logs are on its disk, in /var/log."""
        return self.path / "init.log"


# The files that make a lab's host a separate machine: users, names, keys, and the configuration of its sshd.


_FIRST_PERSON = 1000  # UID_MIN in login.defs(5)
_NOBODY = 65534


@dataclass(frozen=True)
class User:
    """A user on every host of the lab, in the group that may use Docker."""

    name: str
    uid: int


USERS = (User("train", 1500), User("alice", 1501), User("bob", 1502))
DOCKER_GID = 1490


def passwd_file(machine: str) -> str:
    """Return ``/etc/passwd``: the machine's system accounts (sshd needs one) and the lab's users."""
    people = (f"{user.name}:x:{user.uid}:{user.uid}::/home/{user.name}:/bin/bash" for user in USERS)
    return _lines(*_system_entries(machine), *people)


def group_file(machine: str) -> str:
    """Return ``/etc/group`` in the same way; the group ``docker`` is the host's own."""
    system = (line for line in _system_entries(machine) if not line.startswith("docker:"))
    members = ",".join(user.name for user in USERS)
    return _lines(*system, f"docker:x:{DOCKER_GID}:{members}", *(f"{user.name}:x:{user.uid}:" for user in USERS))


def shadow(machine_passwd: str) -> str:
    """Return ``/etc/shadow``: no account has a password, and every account accepts keys."""
    names = [line.split(":")[0] for line in _system_entries(machine_passwd)] + [user.name for user in USERS]
    return _lines(*(f"{name}:*:19000:0:99999:7:::" for name in names))


def hosts_file(own_name: str, addresses: Mapping[str, IPv4Address], *, resolve_names: bool) -> str:
    """Return ``/etc/hosts``: every name of the lab, or only the host's own name (a fault for doctor to find).

    Without the others, the host's own name is 127.0.1.1, as after Debian's installer.
    """
    known = [f"{address} {name}" for name, address in addresses.items()]
    return _lines("127.0.0.1 localhost", *(known if resolve_names else [f"127.0.1.1 {own_name}"]))


def machine_id(lab: str, host: str) -> str:
    """Return ``/etc/machine-id``: 32 hex digits that are the host's own."""
    return _lines(sha256(f"{lab}/{host}".encode()).hexdigest()[:32])


def sshd_config(sftp_server: str, *, has_penalties: bool) -> str:
    """Return ``/etc/ssh/sshd_config``: keys only, and many sessions at once (sshd_config(5)).

    Args:
        has_penalties: this sshd blocks addresses after failed logins (OpenSSH 9.8 and later). In a lab, all users
            connect from one address, and some tests fail to log in on purpose.
    """
    return _lines(
        *(["PerSourcePenalties no"] if has_penalties else []),
        "HostKey /etc/ssh/ssh_host_ed25519_key",
        "AuthenticationMethods publickey",
        "PermitRootLogin no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM yes",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "MaxStartups 100:30:300",
        "MaxSessions 100",
        "LogLevel VERBOSE",
        f"Subsystem sftp {sftp_server}",
    )


def pam_sshd() -> str:
    """Return ``/etc/pam.d/sshd``: ``/etc/environment`` and ``limits.conf`` apply, as on a Debian host.

    Debian's own file also requires ``pam_loginuid``, which fails if the machine itself is a container.
    """
    return _lines(
        "auth     required pam_deny.so",
        "account  required pam_unix.so",
        "session  required pam_env.so",
        "session  required pam_limits.so",
        "session  required pam_unix.so",
        "password required pam_deny.so",
    )


def environment_file(variables: Mapping[str, str]) -> str:
    """Return ``/etc/environment`` (pam_env(8)): the variables of every session on the host."""
    return _lines(*(f'{name}="{value}"' for name, value in variables.items()))


def _system_entries(database: str) -> list[str]:
    """Return the lines of a passwd(5) or group(5) file whose number is not that of a regular user."""
    entries = []
    for line in database.splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit() and not _FIRST_PERSON <= int(fields[2]) < _NOBODY:
            entries.append(line)
    return entries


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


# The machine's records of running labs: one small file per lab, below ``/run``.


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Record:
    """A lab that is up, or whose start is not complete.

    Attributes:
        complete: False until every host answers.
    """

    spec: LabSpec
    subnet: IPv4Network
    folder: Path
    complete: bool = False

    def completed(self) -> Record:
        """Return the same record, marked as complete."""
        return replace(self, complete=True)

    def save(self) -> None:
        """Write it atomically."""
        place = runtime(self.spec.name)
        place.mkdir(parents=True, exist_ok=True)
        fields = {
            "boot_id": _boot_id(),
            "spec": self.spec.to_json(),
            "subnet": str(self.subnet),
            "folder": os.fsdecode(self.folder),
            "complete": self.complete,
        }
        draft = place / ".record.json"
        draft.write_text(json.dumps(fields))
        draft.rename(place / "record.json")


def load_record(lab: str) -> Record | None:
    """Return the record of a lab; None if there is none, if it is older than the last reboot, or if it is invalid."""
    try:
        fields = json.loads((runtime(lab) / "record.json").read_text())
        if fields["boot_id"] != _boot_id():
            return None
        return Record(
            spec=LabSpec.from_json(fields["spec"]),
            subnet=IPv4Network(fields["subnet"]),
            folder=Path(fields["folder"]),
            complete=bool(fields["complete"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(lab: str) -> None:
    """Remove all files of a lab below ``/run``; does nothing if there are none."""
    shutil.rmtree(runtime(lab), ignore_errors=True)


def labs() -> Iterator[Record]:
    """Return every lab of this machine that is up or partly up, by name."""
    for place in sorted(RUNTIME.glob("*/record.json")):
        record = load_record(place.parent.name)
        if record is not None:
            yield record


def runtime(lab: str) -> Path:
    """Return the folder of a lab's record and of its hosts' records."""
    return RUNTIME / lab


def init_record(lab: str, host: str) -> Path:
    """Return the file in which a host's process 1 records its identity."""
    return runtime(lab) / f"{host}.json"


def hosts_with_record(lab: str) -> list[str]:
    """Return the hosts whose process 1 has a record since the lab started."""
    return sorted(path.stem for path in runtime(lab).glob("[!.]*.json") if path.stem != "record")


def locked(lab: str) -> AbstractContextManager[None]:
    """Hold the lock of one lab."""
    return lab_alone(_lock(lab))


def remove_lock(lab: str) -> None:
    """Remove the lock file of a removed lab; only the lock's holder may call this."""
    _lock(lab).unlink(missing_ok=True)


def all_locked() -> AbstractContextManager[None]:
    """Hold the lock for the choice of addresses."""
    return lab_alone(RUNTIME / "all.lock")


def _lock(lab: str) -> Path:
    return RUNTIME / f"{lab}.lock"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


# The files that ``gpurun lab up`` writes for users and for gpurun: inventory, ssh configuration and known_hosts.


INVENTORY = "inventory.yaml"
SSH_CONFIG = "ssh_config"
CLIENT_KEY = "id_ed25519"
KNOWN_HOSTS = "known_hosts"


def lab_known_hosts(hosts: Sequence[LabHost], keys: Mapping[str, str]) -> str:
    """Return every host's key, with its name and its address (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT")."""
    lines = []
    for host in hosts:
        kind, key = keys[host.name].split()[:2]
        lines.append(f"{host.name},{host.address} {kind} {key}\n")
    return "".join(lines)


def lab_ssh_config(folder: Path, hosts: Sequence[LabHost]) -> str:
    """Return the OpenSSH configuration for the hosts: only the lab's key and the lab's host keys."""
    blocks = [f"# Written by gpurun lab up. Try: ssh -F {_quoted(folder / SSH_CONFIG)} {hosts[0].name}\n"]
    blocks += [
        f"Host {host.name}\n"
        f"  HostName {host.address}\n"
        f"  Port 22\n"
        f"  User {USERS[0].name}\n"
        f"  IdentityFile {_quoted(folder / CLIENT_KEY)}\n"
        f"  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {_quoted(folder / KNOWN_HOSTS)}\n"
        f"  GlobalKnownHostsFile /dev/null\n"
        f"  StrictHostKeyChecking yes\n"
        for host in hosts
    ]
    return "\n".join(blocks)


def lab_inventory(spec: LabSpec, hosts: Sequence[LabHost], docker_host: str) -> str:
    """Return the lab's inventory."""
    lines = [
        "# Written by gpurun lab up, and again by every up: edit a copy.",
        "version: 1",
        f"ssh_config: {SSH_CONFIG}",
        f"head: {{docker_host: {json.dumps(docker_host)}}}",
        f"defaults: {{user: {USERS[0].name}, gpus: {spec.gpus}, fabric: {spec.fabric}}}",
        "fabrics:",
        "  tcp: {kind: tcp, interface: eth0}",
    ]
    if spec.fabric == "roce":
        lines.append("  roce: {kind: roce, interface: eth0, hcas: [mlx5_0], traffic_class: 106}")
    lines.append("racks:")
    for rack, members in groupby(hosts, key=lambda host: host.rack):
        lines += [f"  {rack}:", "    hosts:"]
        lines += [f"      {host.name}: {{{_hardware(host)}}}" for host in members]
    return "".join(f"{line}\n" for line in lines)


def _hardware(host: LabHost) -> str:
    model = MODELS[host.generation]
    facts = [
        f"generation: {host.generation}",
        f"gpu_model: {model.name}",
        f"gpu_memory_mib: {model.memory_mib}",
    ]
    groups = nvlink_groups(model, host.gpus)
    if groups:
        facts.append(f"nvlink: {[list(group) for group in groups]}")
    return ", ".join(facts)


def _quoted(path: Path) -> str:
    """Quote a path for ssh_config(5): the path may contain spaces, and a percent sign starts a token."""
    return '"' + str(path).replace("%", "%%") + '"'
