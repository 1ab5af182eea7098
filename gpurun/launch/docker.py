"""The ``docker run`` argv of one host's container. Pure.

Least privilege: the container runs as the SSH user, with only the capabilities that the fabric needs. It can gain no
others, sees only the GPUs of its grant, and is never ``--privileged``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpurun.facts.hardware import DockerFacts
from gpurun.jobs.spec import DATA, DataSource, JobSpec
from gpurun.launch.account import HostAccount
from gpurun.launch.jobssh import MOUNT
from gpurun.launch.share import HostShare
from gpurun.node.gpu.claim_rules import Card, Claimant, container_labels, uuids_of
from gpurun.node.job import cache_rules
from gpurun.node.job.layer_rules import CODE, TARGET, volume_name

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
(`gpurun.node.job.ranks.release`).
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
        found.append(Mount(account.caches_folder(account.caches), cache_rules.TARGET, writable=True))
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
