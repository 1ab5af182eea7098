"""The files that ``gpurun lab up`` writes for users and for gpurun: inventory, ssh configuration and known_hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from gpurun.lab.gpus.models import MODELS
from gpurun.lab.gpus.topology import nvlink_groups
from gpurun.lab.identity import USERS
from gpurun.lab.spec import LabHost, LabSpec

INVENTORY = "inventory.yaml"
SSH_CONFIG = "ssh_config"
CLIENT_KEY = "id_ed25519"
KNOWN_HOSTS = "known_hosts"


def known_hosts(hosts: Sequence[LabHost], keys: Mapping[str, str]) -> str:
    """Return every host's key, with its name and its address (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT")."""
    lines = []
    for host in hosts:
        kind, key = keys[host.name].split()[:2]
        lines.append(f"{host.name},{host.address} {kind} {key}\n")
    return "".join(lines)


def ssh_config(folder: Path, hosts: Sequence[LabHost]) -> str:
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


def inventory(spec: LabSpec, hosts: Sequence[LabHost], docker_host: str) -> str:
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
