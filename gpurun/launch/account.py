"""What only a host itself can say, and a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.inventory.model import Fabric, Host


@dataclass(frozen=True)
class HostAccount:
    """A host's own account of itself, for the user gpurun logs in as.

    Attributes:
        uid, gid: numeric, as text: a container runs as exactly this user.
        home: that user's home directory; the job's folder lies under it.
        hostname: what the host calls itself; Gloo resolves it.
        address: IPv4 address of the fabric's interface.
        sshd: absolute path of OpenSSH's server.
    """

    uid: str
    gid: str
    user: str
    home: str
    hostname: str
    address: str
    sshd: str = "/usr/sbin/sshd"

    def job_folder(self, job: str) -> str:
        """Where a job's files lie on this host; mode 0700."""
        return f"{self.home}/.gpurun/jobs/{job}"

    def outputs_folder(self, job: str) -> str:
        """Where a job's outputs lie on this host while it runs."""
        return f"{self.home}/.gpurun/outputs/{job}"


def assumed_account(host: Host, fabric: Fabric) -> HostAccount:
    """Stand-ins for a plan that is only shown: shell words that mean the right thing on the host itself."""
    return HostAccount(
        uid="$(id -u)",
        gid="$(id -g)",
        user=host.user or "$USER",
        home="$HOME",
        hostname=host.name,
        address=host.fabric_address or f"<{fabric.interface} of {host.name}>",
    )
