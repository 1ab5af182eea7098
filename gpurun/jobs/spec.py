"""What a person asked for, as one frozen value: the job spec.

A recipe and the flags of ``gpurun submit`` become a JobSpec once; everything after reads it and nothing
changes it. Nothing here reads a file or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.jobs.notify_wish import NotifyWish

Controller = Literal["gloo", "mpi"]
Locality = Literal["host", "rack", "any"]
DEFAULT_LAUNCHER = "horovod"
"""What starts the ranks of a job that does not say."""
DATA = "/data"
"""Where containers have data sets, each under its name."""
MOST_GPUS = 1024
"""More GPUs than any host has; an inventory allows 128."""


def check_gpus(gpus: tuple[int, ...]) -> None:
    """Raise ValueError unless these can be GPUs of one host, each named once."""
    if any(not 0 <= gpu < MOST_GPUS for gpu in gpus) or len(set(gpus)) != len(gpus):
        raise ValueError(f"{str(gpus)[:80]} are no GPUs of a host")


def check_path(path: str) -> None:
    """Raise ValueError if no file can have this name: the kernel takes no NUL in a path."""
    if "\0" in path:
        raise ValueError(f"{path[:80]!r} is no path")


@dataclass(frozen=True)
class Grant:
    """GPUs of one host that belong to a gang, in rank order.

    Raises:
        ValueError: there can be no such GPU, or it is named twice; what reads a file takes that for damage.
    """

    host: str
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        check_gpus(self.gpus)


@dataclass(frozen=True)
class Placement:
    """Where a whole gang runs. Ranks follow `grants`: hosts of one rack are neighbours, then GPUs of a host.

    Attributes:
        generation: the one GPU generation of all its hosts.
        racks: the racks it touches, in rank order.
        grants: one per host, in rank order.
    """

    generation: str
    racks: tuple[str, ...]
    grants: tuple[Grant, ...]

    @property
    def gpus(self) -> int:
        """GPUs of all grants together."""
        return sum(len(grant.gpus) for grant in self.grants)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in rank order."""
        return tuple(grant.host for grant in self.grants)


@dataclass(frozen=True)
class Constraints:
    """Where a gang may run.

    Attributes:
        generations: allowed GPU generations; empty = any one of them (a gang never mixes generations).
        gpu_model: exact GPU model, as the inventory writes it.
        min_gpu_memory_mib: least memory of each GPU; hosts that do not say how much they have never match.
        gpus_per_host: exactly this many GPUs on each host of the gang.
        locality: ``host``: one host; ``rack``: one rack; ``any``.
        hosts: only these hosts; empty = all.
        avoid: never these hosts.
        nvlink: on each host only GPUs of one NVLink island.
        locality_wait_s: how long to prefer one rack (or host, see `prefer`) before accepting more.
        prefer: the locality worth that wait.
    """

    generations: tuple[str, ...] = ()
    gpu_model: str | None = None
    min_gpu_memory_mib: int | None = None
    gpus_per_host: int | None = None
    locality: Locality = "any"
    hosts: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    nvlink: bool = False
    prefer: Locality = "any"
    locality_wait_s: float = 0.0

    @property
    def for_one(self) -> Constraints:
        """Where one GPU of such a gang may be."""
        return replace(self, gpus_per_host=None)


@dataclass(frozen=True)
class Roles:
    """What the ranks of a gang do, where they are not all alike. Each worker has a GPU, the others have none.

    Attributes:
        ps: how many parameter servers there are.
        ps_hosts: where they run: names of hosts without GPUs, or labels as ``role=ps``; empty = on the workers' hosts.
        workers: how many workers there are, if a person says so; always one for each GPU.
        chief: whether a rank of its own coordinates the others; None = whatever the launcher takes for usual.
        evaluator: whether a rank evaluates checkpoints beside the training.
        flags: each rank also gets its role and the others' addresses as flags of its command.
    """

    ps: int = 0
    workers: int | None = None
    chief: bool | None = None
    evaluator: bool = False
    flags: bool = False
    ps_hosts: tuple[str, ...] = ()

    @property
    def without_gpu(self) -> int:
        """How many ranks have no GPU."""
        return self.ps + bool(self.chief) + self.evaluator

    @property
    def rehearsal(self) -> Roles:
        """The smallest gang in which each role is played."""
        return replace(self, ps=min(self.ps, 1), workers=1)


@dataclass(frozen=True)
class Environment:
    """Python packages that a job has on top of an image (`gpurun.environments`).

    Attributes:
        kind: what `path` is: a requirements file, a ``uv.lock``, or the folder of a ``pyproject.toml``.
        path: absolute, on the head.
        index: where pip looks for packages: a URL, or an absolute folder of wheels on the head; None = where the
            user's own pip does.
        secret: an absolute netrc file on the head, with passwords for the index.
        base: the image that it was built on, as the person wrote it; "" until it is built.
        base_id: the head's ID of that image.
        packages: what was installed, each as ``name==version``.
    """

    kind: Literal["requirements", "lock", "project"]
    path: str
    index: str | None = None
    secret: str | None = None
    base: str = ""
    base_id: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wants:
    """The part of a spec that passes read. The attributes are those of `JobSpec`."""

    gpus: int
    min_gpus: int | None = None
    constraints: Constraints = Constraints()
    pool: str | None = None
    priority: int = 0
    preemptible: bool = False
    time_limit_s: float | None = None
    grace_s: float = 15.0
    max_restarts: int = 0
    roles: Roles | None = None
    reforms: bool = False
    data_digests: tuple[str, ...] = ()

    @property
    def rehearsal(self) -> Wants:
        """What a rehearsal wants: one GPU where the gang may run."""
        return replace(
            self, gpus=1, min_gpus=self.min_gpus and 1, constraints=self.constraints.for_one,
            roles=self.roles and self.roles.rehearsal,
        )  # fmt: skip

    def ports_on(self, grants: Iterable[Grant]) -> int:
        """How many TCP ports in a row a gang needs on each of its hosts: one, and one for each rank that has a role."""
        return 1 if self.roles is None else 1 + max(len(grant.gpus) for grant in grants) + self.roles.without_gpu


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from.

    Attributes:
        kind: ``folder`` of the head; ``host``: a folder that the hosts have; ``job``: outputs on the head.
        path: an absolute path; of a job's outputs ``JOB:outputs/…``.
        digest: names what it held when the job was submitted, and so what runs; None for what the hosts have.
        size_bytes: of all its files together.
    """

    kind: Literal["folder", "host", "job"]
    path: str
    digest: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class HorovodKnobs:
    """Horovod's own settings, each a flag of horovodrun. None leaves Horovod's default; of the Gloo time-out, ours.

    Source: ``horovodrun --help`` of Horovod 0.28.1.
    """

    fusion_threshold_mb: int | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    torus_allreduce: bool | None = None
    autotune: bool | None = None
    timeline: bool | None = None
    stall_check_warning_s: int | None = None
    stall_check_shutdown_s: int | None = None
    thread_affinity: tuple[int, ...] = ()
    num_nccl_streams: int | None = None
    gloo_timeout_s: int | None = None
    start_timeout_s: int = 120


@dataclass(frozen=True)
class JobSpec:
    """One submission, complete.

    Attributes:
        name: what the person calls it; any text without control characters, never used as a path.
        image: the Docker image reference on the head node, as the person wrote it.
        image_id: the head's ID of it when the job was submitted: what runs, whatever the reference means by then. "" in
            a job that an older gpurun has stored.
        gpus: how many GPUs it needs; each has a rank.
        min_gpus: elastic: it starts and goes on with as few GPUs as this, and grows back; None = not elastic.
        command: the argv each rank runs, byte for byte.
        workdir: absolute folder on the head, sent to every host, read-only at ``/workspace``; None = nothing.
        code: the digest of what the workdir held when the job was submitted: what runs, whatever it holds by then. ""
            in a job without a workdir, and in one that an older gpurun has stored.
        outputs: absolute path inside the container whose content is kept across attempts; None = none.
        outputs_every_s: how often a copy of what has changed in them is brought to the head.
        outputs_limit_mib: the most that the head's copy of them may have; None = what the head's disk has room for.
        env: extra environment of every rank. Not for secrets: process lists and `docker inspect` show it.
        secret_files: name → absolute file on the head; readable in the container at ``/run/secrets/NAME``.
        launcher: what starts the ranks (`gpurun.launch.launchers`).
        roles: what its ranks do; None where they are all alike.
        controller: what horovodrun uses to start ranks.
        time_limit_s: seconds in RUNNING before the gang is ended; None = endless.
        hang_timeout_s: end the gang after this long without any sign of life; None = never.
        grace_s: seconds between SIGTERM and SIGKILL when a gang is ended.
        max_restarts: how often the job may be started again after a host's fault.
        shm_size_mib: size of ``/dev/shm`` in each container.
        mounts: (path on the hosts, path in the container, ``ro`` or ``rw``), such as a shared data set.
        rehearse_s: how long one rank runs the command on one GPU before the gang starts; None = it does not.
        reforms: an elastic gang whose ranks cannot go on when hosts come or go: it is ended, and started again at the
            size that there is. Horovod's ranks can.
        scratch: absolute path inside the container of a writable folder that goes with the attempt; None = none.
        python: the packages on top of the image. In a job that was submitted, `image` and `image_id` are those with the
            packages. None = the image as it is.
        data: name → where the data set comes from that each rank reads at ``/data/NAME``.
        project: what the history and `gpurun report` count the job under.
        notify: who is told when the job starts, ends, fails or is preempted.
    """

    name: str
    image: str
    gpus: int
    command: tuple[str, ...]
    min_gpus: int | None = None
    workdir: str | None = None
    outputs: str | None = None
    outputs_every_s: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)
    secret_files: Mapping[str, str] = field(default_factory=dict)
    constraints: Constraints = Constraints()
    horovod: HorovodKnobs = HorovodKnobs()
    controller: Controller = "gloo"
    pool: str | None = None
    priority: int = 0
    preemptible: bool = False
    time_limit_s: float | None = None
    hang_timeout_s: float | None = None
    grace_s: float = 15.0
    max_restarts: int = 0
    shm_size_mib: int = 1024
    mounts: tuple[tuple[str, str, str], ...] = ()
    launcher: str = DEFAULT_LAUNCHER
    image_id: str = ""
    code: str = ""
    outputs_limit_mib: int | None = None
    rehearse_s: float | None = None
    scratch: str | None = None
    roles: Roles | None = None
    reforms: bool = False
    python: Environment | None = None
    data: Mapping[str, DataSource] = field(default_factory=dict)
    project: str | None = None
    notify: tuple[NotifyWish, ...] = ()

    @property
    def is_live_elastic(self) -> bool:
        """Whether ranks go on when hosts come and go."""
        return self.min_gpus is not None and not self.reforms

    def sized(self, gpus: int) -> JobSpec:
        """The job of one attempt: a gang that is formed again is like any other of the size that it has got."""
        return replace(self, gpus=gpus, min_gpus=None) if self.reforms else self

    @property
    def rehearsal(self) -> JobSpec:
        """The same job on one GPU, whose outputs nobody keeps."""
        small = self.wants.rehearsal
        return replace(
            self, gpus=small.gpus, min_gpus=small.min_gpus, constraints=small.constraints, roles=small.roles,
            outputs=None, scratch=self.outputs, time_limit_s=None,
            horovod=replace(self.horovod, autotune=None, timeline=None),
        )  # fmt: skip

    @property
    def data_digests(self) -> tuple[str, ...]:
        """The data sets that hosts must have, each once."""
        return tuple(sorted({source.digest for source in self.data.values() if source.digest is not None}))

    @property
    def outputs_limit(self) -> int | None:
        """`outputs_limit_mib` in bytes."""
        return None if self.outputs_limit_mib is None else self.outputs_limit_mib << 20

    @property
    def wants(self) -> Wants:
        """What the scheduler needs to know."""
        return Wants(
            self.gpus, self.min_gpus, self.constraints, self.pool, self.priority, self.preemptible, self.time_limit_s,
            self.grace_s, self.max_restarts, self.roles, self.reforms, self.data_digests,
        )  # fmt: skip
