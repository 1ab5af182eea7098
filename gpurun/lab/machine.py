"""The boot instructions of a host: all its own files, and its two services."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from gpurun.lab import hardware, identity
from gpurun.lab.cgroups import Cgroup
from gpurun.lab.commands import run
from gpurun.lab.errors import NotInstalled
from gpurun.lab.gpus.stand_in import HOOK, HOOK_TEXT, StandIn
from gpurun.lab.inside.boot import Boot, Copy, File
from gpurun.lab.inside.init import Service
from gpurun.lab.paths import HostFolder
from gpurun.lab.requirements import SYSTEM_PATH, find
from gpurun.lab.spec import HEAD, LabHost, LabSpec

ALL_LABS = Cgroup("gpurun-lab")

_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
_DOCKER_SHUTDOWN_S = 3
_SERVICE_ENV = {"PATH": SYSTEM_PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"}


def cgroup(lab: str, host: str | None = None) -> Cgroup:
    """Return the cgroup for the containers of a lab, or of one host of it."""
    return Cgroup("/".join(filter(None, (ALL_LABS.name, lab, host))))


def boot(
    spec: LabSpec,
    subnet: IPv4Network,
    hosts: Sequence[LabHost],
    host: LabHost,
    *,
    folder: HostFolder,
    people_key: str,
    stand_in: StandIn,
) -> Boot:
    """Return the instructions for the next start of one host.

    Args:
        hosts: all hosts of the lab, for ``/etc/hosts``.
        people_key: public key that all accounts of the lab's users accept.
    """
    addresses = {HEAD: subnet[1], **{each.name: each.address for each in hosts}}
    texts = {
        **_accounts(),
        "/etc/hosts": identity.hosts(host.name, addresses, resolve_names=spec.resolve_names),
        "/etc/hostname": f"{host.name}\n",
        "/etc/machine-id": identity.machine_id(spec.name, host.name),
        "/etc/resolv.conf": "# no name server in a lab\n",
        "/etc/environment": identity.environment({"GPURUN_SYSFS": str(hardware.INSIDE / hardware.SYSFS)}),
        "/etc/ssh/sshd_config": identity.sshd_config(_sftp_server(), has_penalties=_openssh_version() >= (9, 8)),
        "/etc/pam.d/sshd": identity.pam_sshd(),
    }
    return Boot(
        name=host.name,
        disk=str(folder.disk),
        image=str(folder.image) if spec.disk_mib else None,
        hardware=str(folder.hardware),
        files=(
            *(File(path, text) for path, text in texts.items()),
            File("/etc/shadow", identity.shadow(Path("/etc/passwd").read_text()), mode=0o640),
            File("/etc/ssh/ssh_host_ed25519_key", folder.key.read_text(), mode=0o600),
            File("/etc/docker/daemon.json", "{}\n", keep=True),
            File(f"/usr/bin/{HOOK}", HOOK_TEXT, mode=0o755),
        ),
        authorized_key=people_key,
        copies=(Copy(str(stand_in.library), stand_in.library_in_host),),
        devices=hardware.devices(host),
        homes={user.name: user.uid for user in identity.USERS},
        services=_services(cgroup(spec.name, host.name)),
    )


def _accounts() -> Mapping[str, str]:
    return {
        "/etc/passwd": identity.passwd(Path("/etc/passwd").read_text()),
        "/etc/group": identity.group(Path("/etc/group").read_text()),
    }


def _services(group: Cgroup) -> tuple[Service, ...]:
    dockerd = (
        _daemon("dockerd"),
        "--host=unix:///run/docker.sock",
        "--group=docker",
        f"--cgroup-parent={group.path}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        f"--shutdown-timeout={_DOCKER_SHUTDOWN_S}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
    )
    stale = ("/run/docker.pid", "/run/docker/containerd/containerd.pid")
    return (
        Service("sshd", (_daemon("sshd"), "-D", "-e"), "/var/log/sshd.log", _SERVICE_ENV),
        Service("dockerd", dockerd, "/var/log/dockerd.log", _SERVICE_ENV, stale),
    )


def _daemon(program: str) -> str:
    """Return the path of a program, which must be below /usr, because the hosts see only that part of the machine."""
    path = find(program)
    if path is None or not str(Path(path).resolve()).startswith("/usr/"):
        raise NotInstalled(
            f"a lab needs {program} below /usr, not at {path}", hint=f"install {program} from your distribution"
        )
    return path


def _openssh_version() -> tuple[int, int]:
    """Return the version from ``OpenSSH_9.2p1 Debian-2+deb12u10``. Client and server come from one source package."""
    said = run(["ssh", "-V"], merge_stderr=True)
    match = re.match(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _sftp_server() -> str:
    return next((path for path in _SFTP_SERVERS if Path(path).exists()), "internal-sftp")
