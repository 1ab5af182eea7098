"""Facts that only a host itself knows, and that a plan needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from gpurun.inventory.model import Fabric, Host


@dataclass(frozen=True)
class HostAccount:
    """A host's facts about itself, for the user that gpurun logs in as.

    Attributes:
        uid, gid: numeric, as text: a container runs as exactly this user. An engine that runs as that user calls it 0.
        folder: gpurun's own folder on the host, which contains the job's folder.
        hostname: the host's own name, which Gloo resolves.
        address: IPv4 address of the fabric's interface.
        sshd: absolute path of OpenSSH's server.
        docker_host: the engine that has the job's container, as ``DOCKER_HOST``.
        groups: number and name of each supplementary group that the container's processes have.
        names: name and address of other machines in the host's ``/etc/hosts``.
        caches: whose caches of models and kernels a job there gets; None = nobody's.
    """

    uid: str
    gid: str
    user: str
    folder: str
    hostname: str
    address: str
    sshd: str = "/usr/sbin/sshd"
    docker_host: str = "unix:///var/run/docker.sock"
    groups: tuple[tuple[str, str], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    caches: str | None = None

    def job_folder(self, job: str) -> str:
        """Return the folder of a job's files on this host; mode 0700."""
        return f"{self.folder}/jobs/{job}"

    def outputs_folder(self, job: str) -> str:
        """Return the folder of a job's outputs on this host while it runs."""
        return f"{self.folder}/outputs/{job}"

    def data_folder(self, digest: str | None) -> str:
        """Return the folder of a data set on this host (`gpurun.node.data.data_store`). None: its digest is not known
        yet.
        """
        return f"{self.folder}/data/{(digest or 'DIGEST').removeprefix('sha256:')}/tree"

    def caches_folder(self, owner: str) -> str:
        """Return the folder of a user's caches on this host (`gpurun.node.job.caches`)."""
        return f"{self.folder}/caches/{owner}/files"


def assumed_account(host: Host, fabric: Fabric) -> HostAccount:
    """Return placeholders for a plan that is only shown: shell words that a shell on the host would expand
    correctly. No shell word stands for each of the user's groups or each line of a file, so it has none of these.
    """
    return HostAccount(
        uid="$(id -u)",
        gid="$(id -g)",
        user=host.user or "$USER",
        folder=f"{host.folder}/gpurun-$(id -u)" if host.folder else "$HOME/.gpurun",
        hostname=host.name,
        address=host.fabric_address or f"<{fabric.interface} of {host.name}>",
    )


def contradictions(accounts: Mapping[str, HostAccount]) -> Mapping[str, str]:
    """Return hosts of a gang whose reported name or address would send ranks to the wrong place, each with the reason.

    Every container of the gang gets every host's name and address. So no host may use another's name or address, or a
    name with a special meaning. If two hosts use the same, gpurun cannot tell which is right, and names both.
    """
    names = Counter(account.hostname.lower() for account in accounts.values())
    addresses = Counter(account.address for account in accounts.values())
    known = {host.lower(): host for host in accounts}
    found = {}
    for host, account in accounts.items():
        name, owner = account.hostname.lower(), known.get(account.hostname.lower(), host)
        if name.partition(".")[0] == "localhost" or names[name] > 1:
            found[host] = f"the host's own hostname is {account.hostname!r}, which is not unique among the job's hosts"
        elif owner != host:
            found[host] = f"the host's own hostname is {account.hostname!r}, the name of another host of the job"
        elif not _is_reachable(account.address) or addresses[account.address] > 1:
            found[host] = (
                f"the host's address {account.address} is not unique in the job, or other hosts cannot reach it"
            )
    return found


def _is_reachable(address: str) -> bool:
    """Return whether other hosts can use this address to reach the host."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast)
