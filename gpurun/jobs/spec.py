"""The job spec: a person's request, as one frozen value.

A recipe and the flags of ``gpurun submit`` become a JobSpec once; later steps only read it. This module reads no file
and no clock.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

from gpurun.errors import BadInput
from gpurun.quantities import count, duration

# An error about a setting of a job that depends on more than its own text.


class Disagreement(BadInput):
    """A setting contradicts another one, or what it names is not there.

    Args:
        key: the recipe's key, below the keys that it belongs to: ``constraints``, ``gpus_per_host``.
    """

    def __init__(self, message: str, *key: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.key = key


# Parse notification targets as people write them: ``mail:alice@example.com``, ``failure=slack:FILE``. Pure.


NotifyKind = Literal["mail", "slack", "webhook", "command"]
NotifyEvent = Literal["start", "end", "failure", "preemption", "idle", "slow"]
KINDS: tuple[NotifyKind, ...] = get_args(NotifyKind)
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
MOST_CHARS = 4096
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class NotifyWish:
    """One target.

    Attributes:
        target: a mail address; a file that holds a URL; a URL without secrets; or a command line.
        on: events that gpurun reports to the target.
    """

    kind: NotifyKind
    target: str
    on: tuple[NotifyEvent, ...] = ("start", "end", "failure", "preemption", "idle", "slow")

    @property
    def is_file(self) -> bool:
        """Return whether `target` is a file that holds the URL."""
        return self.kind in ("slack", "webhook") and not is_url(self.target)


def is_url(text: str) -> bool:
    """Return whether a text looks like a URL."""
    return text.startswith(("http://", "https://"))


def checked_url(text: str) -> str:
    """Return a valid URL. The ValueError does not repeat the URL, which may be a secret."""
    if is_url(text) and text.isascii() and text.isprintable() and " " not in text:
        with suppress(ValueError):  # what urlsplit says repeats parts of the URL
            if urlsplit(text).hostname:
                return text
    raise ValueError("is not an http or https URL")


def notify_wish(text: str) -> NotifyWish:
    """Parse ``[EVENT,…=]KIND:TARGET``. Raises ValueError."""
    head, colon, target = text.partition(":")
    on, equals, kind = head.rpartition("=")
    events = tuple(on.split(",")) if equals else EVENTS
    found = next((each for each in KINDS if each == kind), None)
    if found is None or not colon or not target.strip() or len(text) > MOST_CHARS or not text.isprintable():
        raise ValueError
    if wrong := [event for event in events if event not in EVENTS]:
        raise ValueError(f"names an unknown event {wrong[0]!r}; the events are {', '.join(EVENTS)}")
    _check_target(found, target)
    return NotifyWish(found, target, tuple(event for event in EVENTS if event in events))


def _check_target(kind: NotifyKind, target: str) -> None:
    if kind == "mail" and not _ADDRESS.fullmatch(target):
        raise ValueError("has no plain mail address such as alice@example.com")
    if kind == "command":
        shlex.split(target)
    if kind == "slack" and is_url(target):
        raise ValueError(
            "must not have a Slack URL, because this URL is a secret: write the URL into a file, and give slack:FILE"
        )
    if kind == "webhook" and is_url(target):
        parts = urlsplit(checked_url(target))
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "must not have a URL with a user, password, query or fragment, which may be a secret: "
                "write the URL into a file, and give webhook:FILE"
            )


# Compute when a time limit ends a job, and when the job's GPUs are then free. Pure.


PREPARE_S = 60.0
"""Estimate: seconds from the grant to RUNNING. A job that ships a large image takes longer."""

FENCE_S = 15.0
"""Estimate: seconds from the end of the last rank to the end of the fence. A host out of reach takes longer."""


def limit_ends_s(running_s: float | None, limit_s: float | None) -> float | None:
    """Return when the time limit ends an attempt. The limit counts from RUNNING.

    Args:
        running_s: when the attempt entered RUNNING; None = it has not.
        limit_s: the job's time limit; None = it has none.
    """
    return None if running_s is None or limit_s is None else running_s + limit_s


def is_over_limit(ran_s: float | None, limit_s: float | None) -> bool:
    """Return True if the time limit ends the attempt now.

    Args:
        ran_s: seconds in RUNNING, which no step of the head's clock changes; None = it has not entered RUNNING.
        limit_s: the job's time limit; None = it has none.
    """
    return ran_s is not None and limit_s is not None and ran_s > limit_s


# Recognise variables of a job's environment that look like secrets. Pure.


_SECRET = re.compile(r"(TOKEN|(\A|_)KEY|_PAT|(\A|_)CREDENTIALS?)\Z|PASSWORD|PASSWD|SECRET", re.IGNORECASE)


def visible_secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables whose values look secret.

    Every user with access to Docker on a GPU host sees a container's environment in `docker inspect`. A name that ends
    with ``_FILE`` or ``_PATH`` only says where a secret is stored.
    """
    return tuple(sorted(name for name, value in env.items() if value and _SECRET.search(name) and not _is_place(name)))


def _is_place(name: str) -> bool:
    return name.upper().endswith(("_FILE", "_PATH", "_DIR"))


# The words of a command, as text. Pure.


_SURROGATES, _STAND_INS = 0xDC00, 0xEF00
_ODD = re.compile("[\udc80-\udcff\uef80-\uefff]")
_STOOD_IN = re.compile("([\uef80-\uefff]+)")


def as_text(word: str) -> str:
    """Return the text of a word that the system gave (with surrogates) or that a file said."""
    return _ODD.sub(_stand_in, word)


def as_bytes(text: str) -> bytes:
    """Return the bytes of a word."""
    return b"".join(
        bytes(ord(letter) - _STAND_INS for letter in part) if at % 2 else part.encode()
        for at, part in enumerate(_STOOD_IN.split(text))
    )


def quoted(text: str) -> str:
    """Return a word as a POSIX shell reads it. The result is UTF-8 text: ``printf`` makes the other bytes."""
    if _STOOD_IN.search(text) is None:
        return shlex.quote(text)
    return "".join(
        f"\"$(printf '{_octal(part)}')\"" if at % 2 else shlex.quote(part)
        for at, part in enumerate(_STOOD_IN.split(text))
        if part
    )


def _stand_in(found: re.Match[str]) -> str:
    letter = found[0]
    if letter <= "\udcff":
        return chr(ord(letter) - _SURROGATES + _STAND_INS)
    return "".join(chr(_STAND_INS + byte) for byte in letter.encode())


def _octal(text: str) -> str:
    return "".join(f"\\{ord(letter) - _STAND_INS:03o}" for letter in text)


Controller = Literal["gloo", "mpi"]
Locality = Literal["host", "rack", "any"]
DEFAULT_LAUNCHER = "horovod"
"""What starts the ranks of a stored job without the key. For a new job, `gpurun.launch.launchers.choosing` chooses."""
DATA = "/data"
"""Where containers have data sets, each under its name."""
LEAST_MEMORY_MIB = 16
"""The smallest limit of a container's memory. Docker refuses less than 6 MiB."""
MOST_GPUS = 1024
"""More GPUs than any host has; an inventory allows 128."""


def check_gpus(gpus: tuple[int, ...]) -> None:
    """Raise ValueError unless these can be GPUs of one host, each named once."""
    if any(not 0 <= gpu < MOST_GPUS for gpu in gpus) or len(set(gpus)) != len(gpus):
        raise ValueError(f"{str(gpus)[:80]} is not a list of GPU indices of a host")


def check_path(path: str) -> None:
    """Raise ValueError if no file can have this name: a path cannot contain NUL."""
    if "\0" in path:
        raise ValueError(f"{path[:80]!r} is not a path")


@dataclass(frozen=True)
class Grant:
    """GPUs of one host that belong to a gang, in rank order.

    Raises:
        ValueError: the index of a GPU is out of range, or occurs twice; readers of a file treat that as damage.
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
        racks: its racks, in rank order.
        grants: one per host, in rank order.
    """

    generation: str
    racks: tuple[str, ...]
    grants: tuple[Grant, ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all grants."""
        return sum(len(grant.gpus) for grant in self.grants)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in rank order."""
        return tuple(grant.host for grant in self.grants)


@dataclass(frozen=True)
class Constraints:
    """Where a gang may run.

    Attributes:
        generations: allowed GPU generations; empty = any, but a gang never mixes generations.
        gpu_model: exact GPU model, as the inventory writes it.
        min_gpu_memory_mib: least memory of each GPU; hosts whose memory is unknown never match.
        gpus_per_host: exactly this many GPUs on each host of the gang.
        locality: ``host``: one host; ``rack``: one rack; ``any``.
        hosts: only these hosts; empty = all.
        avoid: never these hosts.
        nvlink: on each host, only GPUs that NVLink connects to each other.
        locality_wait_s: how long to wait for one rack (or host, see `prefer`) before accepting more.
        prefer: the locality to wait for.
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
        """Return the constraints for one GPU of such a gang."""
        return replace(self, gpus_per_host=None)


@dataclass(frozen=True)
class Roles:
    """The roles of a gang's ranks, if they differ. Each worker has a GPU, the others have none.

    Attributes:
        ps: the number of parameter servers.
        ps_hosts: the hosts of the parameter servers: names of hosts without GPUs, or labels such as ``role=ps``;
            empty = the workers' hosts.
        workers: the number of workers, if the recipe says it; always one for each GPU.
        chief: whether an extra rank coordinates the others; None = the launcher's default.
        evaluator: whether an extra rank evaluates checkpoints during the training.
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
        """Return the number of ranks without a GPU."""
        return self.ps + bool(self.chief) + self.evaluator

    @property
    def rehearsal(self) -> Roles:
        """Return the smallest gang that has every role."""
        return replace(self, ps=min(self.ps, 1), workers=1)


MOST_RETRIES = 1000
RetryOn = Literal["failure", "hang", "time_limit"]
"""After what a job may be retried: its program failed, gpurun stopped the gang because it hung, or its time limit."""


@dataclass(frozen=True)
class Retry:
    """When gpurun starts a job again after an end that no host's fault explains (`gpurun.supervisor.verdict.ends`).

    Attributes:
        times: how often at most.
        on: after which ends.
        only_with_progress: end the job if two attempts in a row made no progress, or if its time limit ended one
            that made none.
        wait_s: seconds from an attempt's end to the next start; None = 3 s, doubled with each retry.
    """

    times: int = 0
    on: tuple[RetryOn, ...] = ("failure", "hang")
    only_with_progress: bool = True
    wait_s: float | None = None

    @property
    def words(self) -> str:
        """Describe it for people: ``up to 3 retries after a failure or a hang, 30s later, only with progress``."""
        if not self.times:
            return "no retry"
        ends = {"failure": "a failure", "hang": "a hang", "time_limit": "the time limit"}
        after = " or ".join(dict.fromkeys(ends[each] for each in self.on))
        later = "" if self.wait_s is None else f", {duration(self.wait_s)} later"
        only = ", only with progress" if self.only_with_progress else ""
        return f"up to {count(self.times, 'retry', 'retries')} after {after}{later}{only}"


@dataclass(frozen=True)
class Environment:
    """Python packages on top of a job's image (`gpurun.content.inside`).

    Attributes:
        kind: what `path` is: a requirements file, a ``uv.lock``, or the folder of a ``pyproject.toml``.
        path: absolute, on the head.
        index: where pip looks for packages: a URL, or an absolute folder of wheels on the head; None = as the user's
            own pip.
        secret: an absolute netrc file on the head, with passwords for the index.
        base: the base image, as the person wrote it; "" until the environment is built.
        base_id: the head's ID of that image.
        packages: the installed packages, each as ``name==version``.
    """

    kind: Literal["requirements", "lock", "project"]
    path: str
    index: str | None = None
    secret: str | None = None
    base: str = ""
    base_id: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSource:
    """The source of a data set.

    Attributes:
        kind: ``folder``: on the head; ``host``: a folder on the hosts; ``job``: outputs on the head.
        path: an absolute path; for a job's outputs ``JOB:outputs/…``.
        digest: the digest of the content at submit, which the job uses; None for folders of hosts.
        size_bytes: the total size of the data set's files.
    """

    kind: Literal["folder", "host", "job"]
    path: str
    digest: str | None = None
    size_bytes: int | None = None


W = TypeVar("W", bound="Wants")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What a job wants of a pass, besides a number of GPUs. A `JobSpec` is such a value, and a gang holds one.

    Attributes:
        min_gpus: an elastic job starts and continues with at least this many GPUs, and later grows again; None = not
            elastic.
        pool: the pool's name; None = no pool, limited only by the size of the cluster.
        priority: the gang with the larger number starts first, among the gangs of a pool.
        preemptible: the job may use GPUs that its pool borrows; gpurun preempts the job when their owner
            needs them.
        time_limit_s: seconds in RUNNING before gpurun stops the gang; None = unlimited.
        grace_s: seconds between SIGTERM and SIGKILL.
        max_restarts: how often the job may restart after a host's fault.
        roles: the roles of its ranks; None if all ranks are alike.
        reforms: an elastic gang whose ranks cannot continue when hosts join or leave: gpurun stops it, and starts it
            again with the available GPUs. Horovod's ranks can continue.
        data: name → source of the data set that each rank reads at ``/data/NAME``.
    """

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
    data: Mapping[str, DataSource] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((_hashable(self), self.data_digests))

    @property
    def data_digests(self) -> tuple[str, ...]:
        """Return the digests of data sets that hosts must have, each once."""
        return tuple(sorted({source.digest for source in self.data.values() if source.digest is not None}))

    @property
    def servers(self) -> tuple[int, tuple[str, ...]]:
        """Return how many ranks run on hosts without GPUs, and those hosts: names, or labels as ``name=value``."""
        roles = self.roles
        return (roles.ps, roles.ps_hosts) if roles is not None and roles.ps and roles.ps_hosts else (0, ())

    def ports_on(self, grants: Iterable[Grant]) -> int:
        """Return how many consecutive TCP ports a gang needs on each host: where it meets, one for each rank with a
        role, and where NCCL answers.
        """
        return 2 if self.roles is None else 2 + max(len(grant.gpus) for grant in grants) + self.roles.without_gpu

    @property
    def for_one(self: W) -> W:
        """Return what a rehearsal wants: one GPU where the gang may run."""
        return replace(
            self, min_gpus=self.min_gpus and 1, constraints=self.constraints.for_one,
            roles=self.roles and self.roles.rehearsal,
        )  # fmt: skip


_hashable = attrgetter(*(each.name for each in fields(Wants) if each.name != "data"))


@dataclass(frozen=True)
class HorovodKnobs:
    """Horovod's own settings, each a flag of horovodrun. None = Horovod's default; for the Gloo time-out, gpurun's
    default.

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
class Work:
    """What a job runs: the part of its spec that passes do not read.

    Attributes:
        name: the job's name: any text without control characters, never used as a path.
        image: the Docker image reference on the head node, as the person wrote it.
        image_id: the head's ID of the image at submit. The job runs this image even if the reference changes. "" in a
            job that an older gpurun has stored.
        gpus: the number of GPUs; each has a rank.
        command: the command of each rank, as a list of arguments. The characters U+EF80 to U+EFFF stand for the bytes
            80 to FF that are not UTF-8.
        workdir: the absolute path of a folder on the head, of which every rank has a copy at ``/workspace``; None = no
            folder.
        workdir_read_only: ranks cannot write at ``/workspace``. True for jobs that an older gpurun has stored.
        workdir_limit_mib: largest total size of files that ranks write at ``/workspace`` and gpurun copies to the head;
            0 = none.
        code: the digest of the workdir's content at submit. The job runs this content even if the folder changes. ""
            without a workdir, or if an older gpurun has stored the job.
        outputs: absolute path inside the container whose content is kept across attempts; None = none.
        outputs_every_s: how often gpurun copies changed outputs to the head.
        outputs_limit_mib: largest size of the outputs on the head; None = as much as fits on the head's disk.
        log_limit_mib: largest size of the job's log on the head (`gpurun.supervisor.log`).
        env: extra environment of every rank. Not for secrets: `docker inspect` shows the variables, and horovodrun
            writes them into command lines.
        secret_files: name → absolute file on the head; readable in the container at ``/run/secrets/NAME``.
        launcher: the launcher that starts the ranks (`gpurun.launch.launchers`).
        launcher_flags: flags of the launcher's own command line that a person typed and gpurun keeps.
        controller: how horovodrun starts ranks.
        hang_timeout_s: stop the gang after this long without output, progress or files written; None = never.
        idle_timeout_s: the job is idle after this long without GPU use; None = as its pool says.
        memory_mib: the memory of each container, ``/dev/shm`` included; None = in proportion to the job's GPUs
            (`gpurun.launch.container`).
        cpus: the CPU cores of each container while another job runs on the host; None = in proportion to the job's
            GPUs.
        shm_size_mib: size of ``/dev/shm`` in each container, at most `memory_mib`; None = half of `memory_mib`.
        mounts: (path on the hosts, path in the container, ``ro`` or ``rw``), such as a shared data set.
        rehearse_s: how long one rank runs the command on one GPU before the gang starts; None = no rehearsal.
        scratch: the absolute path of a writable folder inside the container; gpurun removes the folder when the attempt
            ends. None = none.
        python: the packages on top of the image. In a submitted job, `image` and `image_id` name the image with the
            packages. None = the image without packages.
        project: the name under which history and `gpurun report` count the job.
        notify: whom gpurun notifies when the job starts, ends, fails or is preempted.
        left_out: the first paths that ignore rules left out of the workdir's copy, such as a folder of data.
        one_per_host: the gang has one rank on each host, which uses all of the job's GPUs on that host. Otherwise, the
            gang has one rank for each GPU.
        retry: how the job is retried after its program failed; None = not at all.
    """

    name: str
    image: str
    gpus: int
    command: tuple[str, ...]
    workdir: str | None = None
    outputs: str | None = None
    outputs_every_s: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)
    secret_files: Mapping[str, str] = field(default_factory=dict)
    horovod: HorovodKnobs = HorovodKnobs()
    controller: Controller = "gloo"
    hang_timeout_s: float | None = None
    memory_mib: int | None = None
    cpus: float | None = None
    shm_size_mib: int | None = None
    mounts: tuple[tuple[str, str, str], ...] = ()
    launcher: str = DEFAULT_LAUNCHER
    image_id: str = ""
    code: str = ""
    outputs_limit_mib: int | None = None
    rehearse_s: float | None = None
    scratch: str | None = None
    python: Environment | None = None
    project: str | None = None
    notify: tuple[NotifyWish, ...] = ()
    log_limit_mib: int = 2048
    launcher_flags: tuple[str, ...] = ()
    one_per_host: bool = False
    workdir_read_only: bool = True
    workdir_limit_mib: int = 10240
    left_out: tuple[str, ...] = ()
    idle_timeout_s: float | None = None
    retry: Retry | None = None


@dataclass(frozen=True)
class JobSpec(Wants, Work):
    """One submission: what the job runs, and what it asks of the scheduler."""

    @property
    def writes_beside(self) -> bool:
        """Return whether ranks may write beside their code (`gpurun.node.job.layer`)."""
        return self.workdir is not None and not self.workdir_read_only

    @property
    def keeps_beside(self) -> bool:
        """Return whether what ranks write beside their code is a part of the outputs."""
        return self.writes_beside and self.workdir_limit_mib > 0

    @property
    def keeps_outputs(self) -> bool:
        """Return whether the head copies anything that ranks write."""
        return self.outputs is not None or self.keeps_beside

    @property
    def workdir_limit(self) -> int:
        """Return `workdir_limit_mib` in bytes."""
        return self.workdir_limit_mib << 20

    @property
    def is_live_elastic(self) -> bool:
        """Return whether ranks continue when hosts join or leave."""
        return self.min_gpus is not None and not self.reforms

    def sized(self, gpus: int) -> JobSpec:
        """Return the job of one attempt: a gang that is formed again is an ordinary gang of its current size."""
        return replace(self, gpus=gpus, min_gpus=None) if self.reforms else self

    @property
    def rehearsal(self) -> JobSpec:
        """Return the same job on one GPU, without outputs."""
        return replace(
            self.for_one, gpus=1, outputs=None, scratch=self.outputs, workdir_limit_mib=0, time_limit_s=None,
            horovod=replace(self.horovod, autotune=None, timeline=None),
        )  # fmt: skip

    @property
    def outputs_limit(self) -> int | None:
        """Return `outputs_limit_mib` in bytes."""
        return None if self.outputs_limit_mib is None else self.outputs_limit_mib << 20

    @property
    def log_limit(self) -> int:
        """Return `log_limit_mib` in bytes."""
        return self.log_limit_mib << 20

    @property
    def wants(self) -> Wants:
        """Return only the part that passes read: jobs that want the same share one, whatever they run."""
        return Wants(**{each.name: getattr(self, each.name) for each in fields(Wants)})


def given_again(name: str, left_out: Iterable[str]) -> tuple[str, str]:
    """Return what to give ranks of what is left out, and the line of ``.gitignore`` that stops leaving it out.

    It is the name's folder if more in that is left out: a rank that misses one file of a data set misses the others.
    """
    folder = posixpath.dirname(name)
    if folder and sum(posixpath.dirname(each) == folder for each in left_out) > 1:
        return folder, f"!/{folder}/*"
    return name, f"!/{name}"
