"""What one host's container gets: its account, its share of memory and cores, and the ``docker run`` argv. Pure.

Least privilege: the container runs as the SSH user, with only the capabilities that the fabric needs. It can gain no
others, sees only the GPUs of its grant, and is never ``--privileged``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType

from gpurun.facts import DockerFacts, Hardware
from gpurun.inventory.model import Fabric, Host, Inventory
from gpurun.jobs.spec import DATA, LEAST_MEMORY_MIB, DataSource, Grant, JobSpec
from gpurun.launch.jobssh import MOUNT
from gpurun.node.claim_rules import CPUS_LABEL, EVENLY, Card, Claimant, container_labels, uuids_of
from gpurun.node.job import rules
from gpurun.node.job.rules import CODE, TARGET, volume_name
from gpurun.quantities import plural

# Facts that only a host itself knows, and that a plan needs.


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
        """Return the folder of a data set on this host (`gpurun.node.data`). None: its digest is not known
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


# Decide what a job's container may use of its host: memory, ``/dev/shm`` and cores. Pure.


LEAST_SYSTEM_MIB = 1024
SYSTEM_PERCENT = 5
"""What a host keeps for itself, if its inventory does not say: this part of its memory, and at least so much, but never
more than half."""
UNKNOWN_SHM_MIB = 1024
"""The size of ``/dev/shm`` if the memory of the host is not known."""
SERVER_GANGS = 8
"""Gangs share a host without GPUs, for their servers. Its memory is promised once if at most so many are there."""
WEIGHT_PER_GPU, MOST_WEIGHT = 1024, 262_144
"""Docker's default weight of a container is 1024, the kernel's largest is 262144 (cgroups(7), ``cpu.shares``)."""
KILLED_FIRST = 1000
"""``oom_score_adj`` of a container that may use more memory than its share: if the host has no memory left, the kernel
kills its processes before those of its neighbours."""


@dataclass(frozen=True)
class HostShare:
    """What a job's container may use of one host.

    Attributes:
        gpus: the job's GPUs there.
        of: all GPUs of the host, also those that its inventory leaves out; 0 = the host has none, and servers share it.
        memory_mib: the hard limit of its memory, `shm_mib` included; None = the memory of the host is not known, or its
            engine cannot limit it.
        shm_mib: the size of ``/dev/shm``. A tmpfs uses only what is written to it.
        cpus: its cores while another job runs there; None = a weight only.
        weight: the weight of its processes when cores are scarce (``--cpu-shares``).
        is_over: the recipe asks for more memory than the share.
        is_even: `cpus` are all cores, and the jobs that run there divide them evenly.
    """

    gpus: int
    of: int
    memory_mib: int | None
    shm_mib: int
    cpus: float | None
    weight: int
    is_over: bool = False
    is_even: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the limits as flags of ``docker run``. Swap adds nothing to the memory."""
        found = ["--cpu-shares", str(self.weight), "--shm-size", f"{self.shm_mib}m"]
        if self.memory_mib is not None:
            found += ["--memory", f"{self.memory_mib}m", "--memory-swap", f"{self.memory_mib}m"]
        if self.is_over:
            found += ["--oom-score-adj", str(KILLED_FIRST)]
        if self.cpus is not None:
            found += ["--label", f"{CPUS_LABEL}={self.cpus:.2f}{EVENLY if self.is_even else ''}"]
        return tuple(found)

    @property
    def words(self) -> str:
        """Return the limits for people."""
        is_all = self.gpus >= self.of
        part = "all" if is_all else f"{self.gpus}/{self.of} of the"
        memory = f"{part} memory" if self.memory_mib is None else f"{size(self.memory_mib)} of memory"
        shm = "half of it" if self.memory_mib is None else f"up to {size(self.shm_mib)} of it"
        cores = f"{part} cores" if self.cpus is None else f"{self.cpus:g} {plural(self.cpus, 'core')}"
        if is_all and not self.is_even:
            return f"{memory} ({shm} in /dev/shm), {cores}"
        evenly = ", divided evenly" if self.is_even else ""
        return f"{memory} ({shm} in /dev/shm), {cores}{evenly} while other jobs run on the host"


def share_of(host: Host, gpus: int, spec: JobSpec, docker: DockerFacts | None, found_gpus: int = 0) -> HostShare:
    """Return the share of a container.

    Args:
        gpus: the job's GPUs on the host.
        found_gpus: how many a probe found there. Another inventory may give those to others that this one leaves out.
        spec: `memory_mib`, `cpus` and `shm_size_mib` take the place of the share. No container gets more than the host
            gives to all containers.
        docker: what the host's engine says of itself; None = not known.
    """
    has_memory = docker is not None and docker.memory_bytes is not None and docker.limits_memory is not False
    usable_mib = _usable_mib(host, docker.memory_bytes >> 20) if has_memory and docker and docker.memory_bytes else None
    of = max(host.gpus, found_gpus) if host.gpus and gpus else 0  # servers have no GPUs
    part = 1.0 if gpus >= of else gpus / of
    fair_mib = (
        None if usable_mib is None else max(LEAST_MEMORY_MIB, int(usable_mib * (part if of else 1 / SERVER_GANGS)))
    )
    memory_mib = fair_mib if spec.memory_mib is None else min(spec.memory_mib, usable_mib or spec.memory_mib)
    shm_mib = spec.shm_size_mib or (UNKNOWN_SHM_MIB if memory_mib is None else max(1, memory_mib // 2))
    return HostShare(
        gpus, of, memory_mib, shm_mib if memory_mib is None else min(shm_mib, memory_mib),
        _cpus(of, part, spec.cpus, None if docker is None else docker.cores),
        weight=min(MOST_WEIGHT, WEIGHT_PER_GPU * max(1, gpus)),
        is_over=memory_mib is not None and fair_mib is not None and memory_mib > fair_mib,
        is_even=not of and spec.cpus is None and docker is not None and docker.cores is not None,
    )  # fmt: skip


def shares(
    spec: JobSpec,
    grants: Sequence[Grant],
    inventory: Inventory,
    hardware: Mapping[str, Hardware] = MappingProxyType({}),
    known: Mapping[str, DockerFacts] = MappingProxyType({}),
) -> dict[str, HostShare]:
    """Return host → share for all hosts of a gang.

    Args:
        hardware: each host's probe.
        known: what is known of the engines of other hosts.
    """
    return {
        grant.host: share_of(
            inventory.by_name[grant.host], len(grant.gpus), spec,
            hardware[grant.host].docker if grant.host in hardware else known.get(grant.host),
            len(hardware[grant.host].gpus) if grant.host in hardware else 0,
        )
        for grant in grants
    }  # fmt: skip


def threads(share: HostShare, ranks: int, cores: int | None) -> int | None:
    """Return how many threads of its own a library may start in each rank (``OMP_NUM_THREADS``).

    OpenMP, MKL and OpenBLAS start a thread for each core of the host, in each rank. With several ranks on a host, that
    is many times too many, also while no other job runs there. torchrun sets 1 for this reason
    (`torch.distributed.run.config_from_args`).

    Args:
        ranks: the job's ranks on the host.
        cores: all cores of the host; None = not known.

    Returns:
        The rank's part of the share, at least 1; None if the rank has the whole host, or if its cores are not known.
    """
    if cores is None or not ranks or (share.cpus is None and not share.of):
        return None
    mine = cores * share.gpus / share.of if share.cpus is None else share.cpus
    each = max(1, int(min(mine, cores) / ranks))
    return each if each < cores else None


def size(mib: int) -> str:
    """Return a size for people and recipes: ``46.2GiB``, ``512MiB``."""
    return f"{mib / 1024:.3g}GiB" if mib >= 1024 else f"{mib}MiB"


def _usable_mib(host: Host, memory_mib: int) -> int:
    """Return the memory of a host for all containers together."""
    system_mib = host.system_memory_mib
    if system_mib is None:
        system_mib = min(max(LEAST_SYSTEM_MIB, memory_mib * SYSTEM_PERCENT // 100), memory_mib // 2)
    return max(LEAST_MEMORY_MIB, memory_mib - system_mib)


def _cpus(of: int, part: float, asked: float | None, cores: int | None) -> float | None:
    """Return the cores while another job runs there; all, to divide evenly, if the host has no GPUs.

    Where there are fewer cores than GPUs, only weights divide them: a limit below one core would slow a job down more
    than it protects another.
    """
    if asked is not None:
        return asked if cores is None else min(asked, float(cores))
    if cores is not None and not of:
        return float(cores)
    if cores is None or part == 1.0 or cores < of:
        return None
    return round(cores * part, 2)


def alike(given: Mapping[str, HostShare]) -> dict[str, list[str]]:
    """Return each different share, for people, with its hosts."""
    hosts: dict[str, list[str]] = {}
    for host, share in given.items():
        hosts.setdefault(share.words, []).append(host)
    return hosts


WORKSPACE = TARGET
SECRETS = "/run/secrets"
AUTOTUNE_FILE = "autotune.csv"
RUN = "/run/gpurun"
"""Where `gpurun.runtime` leaves progress and heartbeats; writable, on the host's side `run` in the job's folder."""
PIDS_PER_GPU = 16384
"""Processes and threads of a container: far more than ranks with data loaders have, far fewer than a fork bomb."""
SCRATCH = "run/scratch"
"""Below the job's folder: what `JobSpec.scratch` is on the host's side."""
_AS_THE_USER = ("--userns", "host", "--security-opt", "label=disable")
"""Whatever a host's engine does to other containers, this one may use the user's own files and the host's network.

With ``userns-remap`` a container's users are strangers to the mounted files, and may not have the host's network. With
SELinux a container may not touch what lies below a home folder; ``:z`` would relabel people's data for ever.
"""
_LOG_OPTIONS = ("max-size=1t", "max-file=1", "compress=false")
"""Docker keeps the whole log until the job has ended, whatever a host's ``daemon.json`` says of other containers.

With some drivers nothing can be read back, and who follows a log while Docker rotates it gets lines twice and others
never (seen with 20.10, ``json-file`` and ``local``). A size is given because engines take no word for "none".

What ranks print is in files of their own, which the host empties as the head copies them
(`gpurun.node.job.ranks.release_output`).
"""


@dataclass(frozen=True)
class Mount:
    """A bind mount; paths may contain any character except a newline."""

    source: str
    target: str
    writable: bool = False

    def argv(self) -> tuple[str, str]:
        """Return the arguments for ``docker run``: one CSV record (docs.docker.com, "bind mounts", ``--mount``)."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        if not self.writable:
            fields.append("readonly")
        return "--mount", ",".join(_csv_field(field) for field in fields)


@dataclass(frozen=True)
class Layer:
    """The volume of what ranks write beside their code (`gpurun.node.job.layer`)."""

    volume: str
    target: str

    def argv(self) -> tuple[str, str]:
        """Return the arguments for ``docker run``. Docker copies nothing of the image into the volume."""
        return "--mount", f"type=volume,source={self.volume},target={self.target},volume-nocopy"


def _csv_field(text: str) -> str:
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if any(c in text for c in ',"\n') else text


def container_name(job: str, attempt: int) -> str:
    """Return the name of a job's container; the same on every host of the gang."""
    return f"gpurun-{job}-{attempt}"


def mounts(job: str, attempt: int, spec: JobSpec, account: HostAccount) -> tuple[Mount | Layer, ...]:
    """Return all folders and files of the host that a container sees."""
    folder = account.job_folder(job)
    found: list[Mount | Layer] = [
        Mount(f"{folder}/launch", MOUNT),
        Mount(f"{folder}/passwd", "/etc/passwd"),
        Mount(f"{folder}/group", "/etc/group"),
        Mount(f"{folder}/run", RUN, writable=True),
    ]
    if spec.writes_beside:
        found.append(Layer(volume_name(job, attempt), WORKSPACE))
    elif spec.workdir is not None:
        found.append(Mount(f"{folder}/{CODE}", WORKSPACE))
    if spec.secret_files:
        found.append(Mount(f"{folder}/secrets", SECRETS))
    if spec.outputs is not None:
        found.append(Mount(account.outputs_folder(job), spec.outputs, writable=True))
    if spec.scratch is not None:
        found.append(Mount(f"{folder}/{SCRATCH}", spec.scratch, writable=True))
    found.extend(Mount(_data_on_host(source, account), f"{DATA}/{name}") for name, source in spec.data.items())
    if account.caches is not None:
        found.append(Mount(account.caches_folder(account.caches), rules.CACHES_TARGET, writable=True))
    found.extend(Mount(source, target, writable=mode == "rw") for source, target, mode in spec.mounts)
    return tuple(found)


def _data_on_host(source: DataSource, account: HostAccount) -> str:
    return source.path if source.kind == "host" else account.data_folder(source.digest)


def gpu_flags(cards: Sequence[Card], engine: DockerFacts | None) -> tuple[str, ...]:
    """Return the flags for the GPUs: by UUID where the engine takes UUIDs, because a failed GPU shifts the indices.

    In CDI's files, older tools name only indices.
    """
    if not cards:
        return ()
    by_index = ",".join(str(index) for index, _ in cards)
    takes_uuids = engine is not None and engine.gpu_support in ("runtime", "hook")
    return "--gpus", f'"device={(uuids_of(cards) if takes_uuids else "") or by_index}"'


def run_argv(
    *,
    claimant: Claimant,
    spec: JobSpec,
    account: HostAccount,
    image: str,
    cards: Sequence[Card],
    names: Iterable[tuple[str, str]],
    environment: Mapping[str, str],
    share: HostShare,
    device_flags: Sequence[str],
    main: Sequence[str],
) -> tuple[str, ...]:
    """Return the whole ``docker run`` argv.

    Args:
        claimant: the attempt; the container's labels name it to every other gpurun that uses the host.
        image: the ID of the image in the host's engine. Docker never pulls: a registry may have another image under
            that name, which would get the job's secrets.
        cards: its GPUs on this host: device indices, and UUIDs if known.
        names: host name and address, first of every host of the gang: Gloo resolves them (``--add-host``). Then the
            other machines in the host's ``/etc/hosts``: with any ``--add-host``, Docker leaves that file out.
        environment: the container's environment; ranks inherit it.
        share: its memory and cores.
        device_flags: its GPUs, and the devices, capabilities and limits that the fabric needs.
        main: argv of the container's main process; replaces the image's entry point.
    """
    job = claimant.job
    argv = ["docker", "run", "--detach", "--pull", "never", "--name", container_name(job, claimant.attempt)]
    for name, value in container_labels(claimant, cards).items():
        argv += ["--label", f"{name}={value}"]
    argv += ["--log-driver", "json-file", *(word for option in _LOG_OPTIONS for word in ("--log-opt", option))]
    argv += ["--init", "--network", "host", "--user", f"{account.uid}:{account.gid}"]
    for gid, _ in account.groups:
        argv += ["--group-add", gid]
    argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", *_AS_THE_USER]
    argv += ["--pids-limit", str(PIDS_PER_GPU * max(1, len(cards)))]
    argv += [*share.flags, *device_flags]
    for name, address in names:
        argv += ["--add-host", f"{name}:{address}"]
    for mount in mounts(job, claimant.attempt, spec, account):
        argv += mount.argv()
    for name, value in environment.items():
        argv += ["--env", f"{name}={value}"]
    if spec.workdir is not None:
        argv += ["--workdir", WORKSPACE]
    return (*argv, "--entrypoint", main[0], image, *main[1:])
