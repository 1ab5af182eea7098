"""One frozen plan per attempt: everything that gpurun will do on every host, decided before it does anything.

``submit --dry-run`` prints the plan, the supervisor executes it, tests compare it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpurun.errors import BadInput
from gpurun.facts import Hardware
from gpurun.inventory.model import FabricKind, Host, Inventory
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch import fabric, jobssh, rank
from gpurun.launch.container import (
    RUN,
    SCRATCH,
    HostAccount,
    HostShare,
    assumed_account,
    container_name,
    gpu_flags,
    run_argv,
    shares,
    threads,
)
from gpurun.launch.fabric import Setting
from gpurun.launch.jobssh import ALIVE_S, HOSTS_FILE, hosts_text, member_names
from gpurun.launch.launchers import PlacedGang, horovod, launcher_of
from gpurun.launch.launchers.direct import START_SCRIPT, rank_variables, start_script
from gpurun.launch.launchers.launcher import unset_names
from gpurun.node.claim_rules import Card, Claimant
from gpurun.node.job.rules import ALONE, CACHES_TARGET, FOLLOW_XDG, VARIABLES
from gpurun.quantities import count

# Which caches of models and kernels the ranks of a host get, and the variables that lead there. Pure.


def owner_of(claimant: Claimant) -> str:
    """Return whose caches a job uses: nobody else's job on the host sees them, under whatever account."""
    return f"{claimant.state}-{claimant.uid}"


def owner_on(host: Host, spec: JobSpec, claimant: Claimant) -> str | None:
    """Return whose caches a job's ranks get on a host; None = nobody's."""
    return owner_of(claimant) if _has_caches(host, spec) else None


def _has_caches(host: Host, spec: JobSpec) -> bool:
    """Return whether a job's ranks get the user's caches on a host. What a recipe mounts in their place wins."""
    folders = [target for _, target, _ in spec.mounts]
    folders += [each for each in (spec.outputs, spec.scratch) if each is not None]
    return host.cache_quota_mib is not None and not any(_overlap(CACHES_TARGET, each) for each in folders)


def _overlap(one: str, other: str) -> bool:
    first, second = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return first.startswith(second) or second.startswith(first)


def cache_settings(host: Host, spec: JobSpec, image_sets: Collection[str]) -> list[Setting]:
    """Return the variables that lead to the caches, without those that the user or the image sets.

    Who sets HOME or XDG_CACHE_HOME has said where the caches are that follow it.
    """
    if not _has_caches(host, spec):
        return []
    given = {*spec.env, *image_sets}
    is_said = "XDG_CACHE_HOME" in given or "HOME" in spec.env
    left_out = {*given, *(("XDG_CACHE_HOME", *FOLLOW_XDG) if is_said else ())}
    why = "the user's jobs share the caches on this host"
    found = [Setting(name, path, why, "inventory") for name, path in VARIABLES.items() if name not in left_out]
    alone = "jobs do not share this cache, because a killed build leaves a lock"
    return found + [Setting(name, path, alone, "default") for name, path in ALONE.items() if name not in left_out]


# Where NCCL says which rank the others wait for. Pure.


def ras_port(spec: JobSpec, grants: Sequence[Grant], port: int) -> int:
    """Return the port on which NCCL answers on each host of a gang: the last one that the gang owns.

    Args:
        port: the first one.
    """
    return port + spec.wants.ports_on(grants) - 1


def ras_settings(spec: JobSpec, port: int) -> list[Setting]:
    """Return the variable for that port (NCCL user guide, NCCL_RAS_ADDR; NCCL before 2.24 ignores it)."""
    if spec.gpus < 2 or RAS in spec.env:
        return []
    why = "gpurun asks NCCL there which rank a hanging job waits for; each job of the host has a port of its own"
    return [Setting(RAS, f"{fabric.LOOPBACK_ADDRESS}:{port}", why, "default")]


RAS = "NCCL_RAS_ADDR"
LAUNCH = f"{jobssh.MOUNT}/bin/launch"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class HostPlan:
    """The plan for one host of the gang.

    Attributes:
        folder: the job's folder there, absolute.
        container: the container's name.
        run: the ``docker run`` argv.
        settings: environment for the host's fabric, each variable with its reason.
        files: path below `folder` → (text, mode).
        ranks: the variables of each of its ranks, in rank order; empty if a launcher sets them.
        ports: TCP ports on which its ranks may listen.
        share: the memory and cores of its container; None in a plan of an older gpurun.
    """

    host: str
    gpus: tuple[int, ...]
    folder: str
    outputs: str | None
    container: str
    run: tuple[str, ...]
    settings: tuple[fabric.Setting, ...]
    files: Mapping[str, tuple[str, int]]
    ranks: tuple[Mapping[str, str], ...] = ()
    ports: tuple[int, ...] = ()
    share: HostShare | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of an attempt.

    Attributes:
        ssh_port: the port of the job's own sshd; without one, of the ranks' rendezvous on the first host.
        hosts: in rank order.
        launch: the argv that starts the ranks: of the first container's main process or, if gpurun starts the ranks on
            every host, of each rank. The script at its end, `rank.RANK_SCRIPT`, contains the job's command.
        has_launcher: whether `launch` is the first container's.
    """

    job: str
    attempt: int
    image: str
    ssh_port: int
    hosts: tuple[HostPlan, ...]
    launch: tuple[str, ...]
    has_launcher: bool = True

    @property
    def first(self) -> HostPlan:
        """Return the host of rank 0."""
        return self.hosts[0]


def make_plan(
    *,
    claimant: Claimant,
    spec: JobSpec,
    grants: Sequence[Grant],
    inventory: Inventory,
    accounts: Mapping[str, HostAccount],
    ssh_port: int,
    hardware: Mapping[str, Hardware] = MappingProxyType({}),
    image_sets: Collection[str] = (),
    joins: Sequence[str] = (),
    images: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Plan an attempt.

    Args:
        claimant: the attempt.
        grants: the gang's GPUs in rank order.
        accounts: the hosts' facts about themselves; a missing host gets placeholders (dry run).
        hardware: each host's probe; for a missing host, the inventory alone decides.
        image_sets: the names of the variables that the image sets.
        joins: hosts that joined an elastic gang after its start.
        images: host → its engine's ID of the image; a missing host gets the head's ID.

    Raises:
        BadInput: the hosts' fabrics name different interfaces, but the launcher needs one for all.
    """
    job, attempt = claimant.job, claimant.attempt
    hosts = [inventory.by_name[grant.host] for grant in grants]
    launcher = launcher_of(spec)
    alone = len(grants) == 1 and not spec.is_live_elastic
    fabrics = {host.name: fabric.for_gang(inventory.fabric_of(host), is_alone=alone) for host in hosts}
    interfaces = {name: used.interface for name, used in fabrics.items()}
    if launcher.argv is not None and len(used := set(interfaces.values())) > 1:
        raise BadInput(
            f"the job's hosts use different network interfaces ({', '.join(sorted(used))})", job=job,
            hint="give all hosts of a generation the same fabric, or list only hosts of one fabric "
            "under constraints.hosts",
        )  # fmt: skip
    known = {h.name: accounts.get(h.name) or assumed_account(h, inventory.fabric_of(h)) for h in hosts}
    known = {h.name: replace(known[h.name], caches=owner_on(h, spec, claimant)) for h in hosts}
    if alone:
        known = {name: replace(each, address=fabric.LOOPBACK_ADDRESS) for name, each in known.items()}
    gang = PlacedGang(
        f"{job}.{attempt}", grants, interfaces, {name: found.address for name, found in known.items()}, ssh_port,
        is_tcp=all(used.kind is FabricKind.TCP for used in fabrics.values()), given=frozenset(spec.env),
        roles=spec.roles, one_per_host=spec.one_per_host,
    )  # fmt: skip
    launch = launcher.argv(spec, gang) if launcher.argv is not None else (rank.RANK_SCRIPT,)
    settings = {
        host.name: fabric.fabric_settings(fabrics[host.name], host, hardware.get(host.name), spec.env) for host in hosts
    }
    settings = {host.name: settings[host.name].beside(cache_settings(host, spec, image_sets)) for host in hosts}
    ras = ras_port(spec, grants, ssh_port)
    settings = {host: found.beside(ras_settings(spec, ras)) for host, found in settings.items()}
    given = shares(spec, grants, inventory, hardware)
    if THREADS not in {*spec.env, *image_sets}:
        for host, found in settings.items():
            ranks = sum(place.host == host for place in gang.places)
            own = _threads(given[host], ranks, hardware.get(host), one_per_host=spec.one_per_host)
            settings[host] = found.beside(own)
    notice_s = 0.0 if spec.is_live_elastic else rank.NOTICE_S
    scripts = {
        host: rank.rank_script(found.environment, launcher, spec.command, grace_s=spec.grace_s, notice_s=notice_s)
        for host, found in settings.items()
    }
    names = {name: f.address for name, f in known.items()} | {f.hostname: f.address for f in known.values()}
    own_names = {name.lower() for name in names}
    container, unset = container_name(job, attempt), unset_names(gang.size, gang.given)
    common = {"launch/gang.json": (_gang_text(claimant, gang), 0o644)}
    if spec.scratch is not None:
        common[f"{SCRATCH}/.removed"] = (
            "gpurun removes all files in this folder when the attempt ends.\n",
            0o644,
        )

    def starting(index: int, mine: HostAccount) -> dict[str, tuple[str, int]]:
        if launcher.argv is None:
            return {"launch/bin/start": (start_script(launcher, gang, grants[index].host), 0o755)}
        if index == 0:
            return _launcher_files(spec, known, grants, joins, ssh_port)
        return _sshd_files(mine, job, container, ssh_port, unset)

    def host_plan(index: int, grant: Grant) -> HostPlan:
        mine, found, probe = known[grant.host], settings[grant.host], hardware.get(grant.host)
        own = cards(grant, probe)
        first = index == 0
        hold = [f"{jobssh.MOUNT}/bin/hold"]
        main = [START_SCRIPT] if launcher.argv is None else [LAUNCH, *launch] if first else hold
        return HostPlan(
            host=grant.host,
            gpus=grant.gpus,
            folder=mine.job_folder(job),
            outputs=mine.outputs_folder(job) if spec.outputs is not None else None,
            container=container,
            run=run_argv(
                claimant=claimant, spec=spec, account=mine, image=images.get(grant.host, spec.image_id or spec.image),
                cards=own, names=(*names.items(), *(each for each in mine.names if each[0].lower() not in own_names)),
                environment=_environment(job, attempt, spec, found), share=given[grant.host],
                device_flags=(*gpu_flags(own, probe.docker if probe else None), *found.docker_flags), main=main,
            ),
            settings=found.environment,
            files={
                **common,
                **_common_files(mine, unset),
                **starting(index, mine),
                "launch/bin/rank": (scripts[grant.host], 0o755),
            },
            ranks=rank_variables(launcher, gang, grant.host) if launcher.argv is None else (),
            ports=(*(gang.ports_of(grant.host) if launcher.argv is None else ()), *([ras] if spec.gpus > 1 else [])),
            share=given[grant.host],
        )  # fmt: skip

    plans = tuple(host_plan(index, grant) for index, grant in enumerate(grants))
    return Plan(job, attempt, spec.image, ssh_port, plans, launch, launcher.argv is not None)


def cards(grant: Grant, hardware: Hardware | None) -> tuple[Card, ...]:
    """Return the GPUs of a grant, with their UUIDs if the host was probed."""
    uuids = {gpu.index: gpu.uuid for gpu in hardware.gpus} if hardware is not None else {}
    return tuple((index, uuids.get(index, "")) for index in grant.gpus)


def _threads(share: HostShare, ranks: int, hardware: Hardware | None, *, one_per_host: bool) -> list[fabric.Setting]:
    """Return OMP_NUM_THREADS of a host's ranks. One process for each host starts one for each GPU, as a rule."""
    cores = hardware.docker.cores if hardware is not None else None
    parts, what = (share.gpus, "GPU") if one_per_host else (ranks, "rank")
    each = threads(share, parts, cores)
    if each is None or cores is None:
        return []
    why = f"the job's share of {count(cores, 'core')}, divided by {count(parts, what)}"
    return [fabric.Setting(THREADS, str(each), why, "probe")]


def _environment(job: str, attempt: int, spec: JobSpec, found: fabric.FabricSettings) -> dict[str, str]:
    """Return a container's environment: gpurun's own, the fabric's, then the user's."""
    environment = {"GPURUN_JOB": job, "GPURUN_ATTEMPT": str(attempt), "GPURUN_RUN": RUN}
    environment["GPURUN_GANG"] = f"{jobssh.MOUNT}/gang.json"
    environment["HOME"] = "/tmp"  # noqa: S108 (inside the container)
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's own begins with the fastest GPU
    if folder := spec.outputs or spec.scratch:
        environment["GPURUN_OUTPUTS"] = folder
    environment |= horovod.knob_variables(spec.horovod)
    environment |= {setting.name: setting.value for setting in found.environment}
    return environment | dict(spec.env)


def _gang_text(claimant: Claimant, gang: PlacedGang) -> str:
    """Return the description of the gang for programs in the containers (`gpurun_runtime.gang`)."""
    hosts = [
        {"name": grant.host, "address": gang.addresses[grant.host], "gpus": len(grant.gpus), "ranks": each}
        for grant, each in zip(gang.grants, gang.ranks_of_hosts, strict=True)
    ]
    told = {
        "one_per_host": gang.one_per_host,
        "job": claimant.job,
        "attempt": claimant.attempt,
        "port": gang.port,
        "hosts": hosts,
        "roles": gang.peers(),
    }
    return json.dumps(told) + "\n"


def _common_files(mine: HostAccount, unset: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the texts in the job's folder that every host gets, and that do not depend on keys."""
    files = {f"launch/bin/{name}": (text, 0o755) for name, text in jobssh.scripts(unset).items()}
    files["passwd"] = (jobssh.passwd(user=mine.user, uid=mine.uid, gid=mine.gid), 0o644)
    files["group"] = (jobssh.group(user=mine.user, gid=mine.gid, others=mine.groups), 0o644)
    return files


def _sshd_files(
    mine: HostAccount, job: str, container: str, ssh_port: int, unset: Sequence[str]
) -> dict[str, tuple[str, int]]:
    config = jobssh.sshd_config(
        folder=mine.job_folder(job), address=mine.address, port=ssh_port, user=mine.user, uid=mine.uid,
        docker_host=mine.docker_host, container=container, unset=unset,
    )  # fmt: skip
    return {"sshd/config": (config, 0o600)}


def _launcher_files(
    spec: JobSpec, known: Mapping[str, HostAccount], grants: Sequence[Grant], joins: Sequence[str], ssh_port: int
) -> dict[str, tuple[str, int]]:
    names = member_names(grants, joins)
    peers = [(n, g.host, known[g.host].address, known[g.host].user) for n, g in zip(names, grants, strict=True)][1:]
    alive = (ALIVE_S, 2) if spec.is_live_elastic else (15, 8)
    files = {
        "launch/ssh/config": (jobssh.client_config(peers, port=ssh_port, alive_s=alive[0], alive_count=alive[1]), 0o644)
    }
    if spec.is_live_elastic:
        files[HOSTS_FILE] = (hosts_text(grants, joins), 0o644)
    return files
