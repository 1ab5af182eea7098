"""Hosts of a gang as a folder beside the state directory: the part of the world that a power cut of the head leaves.

Whatever lives on a host is an empty folder whose name says all, made and removed in one system call, so that what the
hosts had at any moment can be told from a recording. gpurun's own supervisor acts on them, through agents that answer
the operations of `gpurun.node`; only the image, the pre-flight and the watching of containers are left out. The hosts
see for themselves what no lease may allow: two gangs on one GPU.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from gpurun.content.tree import FileTree
from gpurun.errors import HostFailure
from gpurun.head import spawn, submit
from gpurun.jobs.record import FirstFailure, State
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.node.folder import contents
from gpurun.node.folder.contents import Listed
from gpurun.remote.agent import Reply
from gpurun.remote.fleet import Results
from gpurun.supervisor import life, start, stop
from gpurun.supervisor import start as elsewhere
from gpurun.supervisor import start as prepare
from gpurun.supervisor import stop as lost
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.log import JobLog
from gpurun.supervisor.verdict.ends import End, GangEnd

LINES = 3
MOST_HOSTS = 3
BOX = re.compile(r"box-(j-[0-9a-f]{8})-(\d+)-([\d.]+)-(created|running)")
CLAIM = re.compile(r"claim-(\d+)-(j-[0-9a-f]{8})-(\d+)")
SAVED = re.compile(r"outputs-(j-[0-9a-f]{8})-(\d+)")
NOTHING_LEFT = {"containers": [], "processes": [], "folder": False, "users": [], "gpu_problem": "", "claims": []}


class World:
    """What is outside the head: its hosts, and what people were told (`told`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, hosts: tuple[str, ...]) -> None:
        for name in (*hosts, "told"):
            (self.folder / name).mkdir(parents=True)

    def tell(self, what: str) -> None:
        """Something that people now rely on."""
        (self.folder / "told" / what).mkdir(exist_ok=True)

    def told(self, what: str) -> list[str]:
        """Everything of one kind that people were told: what comes after ``what-``."""
        names = sorted(path.name for path in self.folder.glob("told/*"))
        return [name.removeprefix(f"{what}-") for name in names if name.startswith(f"{what}-")]

    def things(self, host: str) -> list[str]:
        return sorted(path.name for path in (self.folder / host).iterdir())

    def hosts(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*") if path.name != "told")

    def boxes(self, host: str) -> Iterator[tuple[str, int, tuple[int, ...], str, str]]:
        """Containers: job, attempt, GPUs, status, and the name of the thing."""
        for name in self.things(host):
            if found := BOX.fullmatch(name):
                yield found[1], int(found[2]), tuple(map(int, found[3].split("."))), found[4], name

    def saved_step(self, host: str, job: str) -> int:
        """The newest checkpoint of a job on a host; 0 = none."""
        found = [SAVED.fullmatch(name) for name in self.things(host)]
        return max((int(each[2]) for each in found if each and each[1] == job), default=0)

    def save(self, host: str, job: str, step: int) -> None:
        before = [name for name in self.things(host) if name.startswith(f"outputs-{job}-")]
        (self.folder / host / f"outputs-{job}-{step}").mkdir(exist_ok=True)
        for name in before:
            if name != f"outputs-{job}-{step}":
                (self.folder / host / name).rmdir()

    def remove(self, host: str, begins: str) -> None:
        for name in self.things(host):
            if name.startswith(begins):
                (self.folder / host / name).rmdir()


class PowerAgent:
    """The agent of one host, as far as a job's life needs it."""

    def __init__(self, world: World, host: str, lease: Lease | None) -> None:
        self.world, self.host, self.lease = world, host, lease
        self.place = world.folder / host

    def call(self, op: str, **arguments: Any) -> Reply:
        return Reply(getattr(self, op.replace(".", "_"))(**arguments))

    def stream(self, op: str, *, silence_s: float | None = None, **arguments: Any) -> Iterator[Reply]:
        yield from getattr(self, op.replace(".", "_"))(**arguments)

    def gang_prepare(self, job: str, **_: object) -> Mapping[str, Any]:
        (self.place / f"files-{job}").mkdir(exist_ok=True)
        return {
            "public_key": "ssh-ed25519 AAAA", "uid": "1000", "gid": "1000", "groups": [], "user": "train", "names": [],
            "folder": "/h/.gpurun", "hostname": self.host, "address": self._address(), "sshd": "/usr/sbin/sshd",
            "docker_host": "unix:///var/run/docker.sock",
        }  # fmt: skip

    def _address(self) -> str:
        return f"10.0.0.{1 + zlib.crc32(self.host.encode()) % 250}"

    def gang_inspect(self, job: str) -> list[Mapping[str, str]]:
        mine = [box for box in self.world.boxes(self.host) if box[0] == job]
        return [{"attempt": str(attempt), "status": status} for _, attempt, _, status, _ in mine]

    def claims_take(self, claimant: Mapping[str, Any], cards: Sequence[tuple[int, str]], **_: object) -> None:
        """One head asks, so nobody may hold what it asks for: gpurun frees GPUs only when their claims are gone."""
        job, attempt = claimant["job"], claimant["attempt"]
        for gpu, _ in cards:
            for name in self.world.things(self.host):
                if (held := CLAIM.fullmatch(name)) and int(held[1]) == gpu and held[2] != job:
                    self.world.tell(f"violation-{self.host} GPU {gpu} is claimed by {held[2]} and {job}")
            (self.place / f"claim-{gpu}-{job}-{attempt}").mkdir(exist_ok=True)

    def gang_create(self, job: str, run: list[str], **_: object) -> None:
        devices = run[run.index("--gpus") + 1]
        gpus = tuple(map(int, re.findall(r"\d+", devices)))
        attempt = run[run.index("--name") + 1].rpartition("-")[2]
        for other, _, theirs, _, _ in self.world.boxes(self.host):
            if other != job and set(gpus) & set(theirs):
                self.world.tell(f"violation-{self.host} runs {other} and {job} on GPUs {gpus}, {theirs}")
        (self.place / f"box-{job}-{attempt}-{'.'.join(map(str, gpus))}-created").mkdir()

    def gang_start(self, container: str, **_: object) -> None:
        for job, attempt, _, status, name in self.world.boxes(self.host):
            if f"gpurun-{job}-{attempt}" == container and status == "created":
                (self.place / name).rename(self.place / name.replace("-created", "-running"))

    def gang_signal(self, job: str, **_: object) -> bool:
        return False

    def gang_progress(self, job: str, **_: object) -> Mapping[str, Any]:
        return {"age_s": None, "ranks": {}}

    def gang_fence(
        self,
        job: str,
        attempt: int,
        files: bool = True,
        outputs: bool = False,
        claimant: Mapping[str, Any] | None = None,
        **_: object,
    ) -> Mapping[str, Any]:
        if self.lease is not None and is_silent(self.lease, self.host):
            raise HostFailure("it is silent", host=self.host)
        later = False
        for of, number, _, _, name in self.world.boxes(self.host):
            if of == job and number <= attempt:
                self.world.remove(self.host, name)
            later = later or (of == job and number > attempt)
        files, outputs = files and not later, outputs and not later
        if files:
            self.world.remove(self.host, f"files-{job}")
        if outputs:
            self.world.remove(self.host, f"outputs-{job}-")
        for name in self.world.things(self.host) if claimant is not None else ():
            if (claim := CLAIM.fullmatch(name)) and (claim[2], claim[3]) == (job, str(claimant["attempt"])):
                self.world.remove(self.host, name)
        return NOTHING_LEFT

    def outputs_list(self, job: str, **_: object) -> Iterator[Reply]:
        step = self.world.saved_step(self.host, job)
        yield from _stream([(self._checkpoint(step).header(), b"")] if step else [])
        yield Reply({"present": step > 0})

    def outputs_read(self, job: str, payload_in: Iterator[bytes], **_: object) -> Iterator[Reply]:
        asked = [frame.header["p"] for frame in contents.unpacked(payload_in)]
        assert asked in ([], ["checkpoint"])
        step = self.world.saved_step(self.host, job)
        text, marks = str(step).encode(), self._checkpoint(step).marks
        yield from _stream(
            [({"n": 0, "marks": marks, "sha": sha256(text).hexdigest(), "after": marks}, text)][: len(asked)]
        )
        yield Reply()

    def outputs_write(self, job: str, attempt: int, payload_in: Iterator[bytes]) -> Iterator[Reply]:
        content = b"".join(bytes(frame.payload) for frame in contents.unpacked(payload_in))
        self.world.save(self.host, job, int(content))
        yield Reply({"files": 1})

    def outputs_remove(self, job: str, **_: object) -> None:
        self.world.remove(self.host, f"outputs-{job}-")

    def _checkpoint(self, step: int) -> Listed:
        return Listed("checkpoint", "file", 0o644, step, len(str(step)), (step, 1))


def _stream(items: list[contents.Item]) -> Iterator[Reply]:
    for piece in contents.packed(items):
        yield Reply(None, piece)


class PowerLinks:
    """In the place of `gpurun.supervisor.links.Links`.

    Args:
        lease: whose attempt it is; None: hosts that were lost and are asked again, which answer by now.
    """

    fleet = None
    epilogs: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def __init__(self, world: World, hosts: tuple[str, ...], lease: Lease | None = None) -> None:
        self.targets = {host: PowerAgent(world, host, lease) for host in hosts}

    def open(self, _hosts: object = None, **_: object) -> Mapping[str, HostFailure]:
        return {}

    def is_open(self, host: str) -> bool:
        return host in self.targets

    def agent(self, host: str) -> PowerAgent:
        return self.targets[host]

    def each(self, call: Any, hosts: Any = None) -> Results[Any]:
        ok: dict[str, Any] = {}
        failed: dict[str, Any] = {}
        for host in self.targets if hosts is None else hosts:
            try:
                ok[host] = call(self.targets[host])
            except HostFailure as error:
                failed[host] = error
        return Results(ok, failed)

    def cut(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def is_silent(lease: Lease, host: str) -> bool:
    """Whether this host fails the attempt: the first one of a third of all first attempts that fit without it too."""
    fails = lease.attempt == 1 and len(lease.grants) < MOST_HOSTS and zlib.crc32(lease.job.encode()) % 3 == 0
    return fails and host == lease.grants[0].host


def watch(world: World, job: SupervisedJob) -> State:
    """RUNNING: the ranks print and save a checkpoint; then the launcher has ended."""
    first, attempt = job.hosts[0], job.lease.attempt
    silent = is_silent(job.lease, first)
    if not silent:
        step = world.saved_step(first, job.lease.job) + 1
        world.save(first, job.lease.job, step)
        world.tell(f"saved-{job.lease.job}-{step}")
        world.tell(f"printed-{job.lease.job}-{attempt}")
        copy_log(world, job)
    job.check_requests(ladder=True)
    if silent:
        raise GangEnd(End(State.QUEUED, f"{first} is silent", 4, suspects=(first,)))
    if attempt == 1 and zlib.crc32(job.lease.job.encode()) % 3 == 1:
        failure = FirstFailure("rank 0 failed", rank=0, host=first, exit_code=1, kind="rank")
        raise GangEnd(End(State.FAILED, "rank 0 failed", 1, failure=failure))  # and is retried: it has saved
    raise GangEnd(End(State.SUCCEEDED, "", 0))


def end_log(world: World, job: SupervisedJob, hosts: Iterable[str]) -> set[str]:
    """In the place of `stop._end_log`: all hosts have nothing more then."""
    copy_log(world, job)
    return set(hosts)


def copy_log(world: World, job: SupervisedJob) -> None:
    """What a gang whose container is still there has printed is brought home; what is here already is passed over."""
    first, attempt = job.hosts[0], job.lease.attempt
    if not any((of, number) == (job.lease.job, attempt) for of, number, *_ in world.boxes(first)):
        return
    log = JobLog(job.folder.log, attempt=attempt, now=job.clock)
    for line in printed(attempt):
        if line.partition(" ")[0] >= log._known.last:  # as Docker, asked for what came since then
            log.take("stdout", f"{line}\n".encode())
    text = printed_by_rank(attempt)
    had, *_ = log.have(first).get("0.1", [0])
    log.take_output(f"{first}/0.1", 0, "o", len(text), text[had:])
    log.close()


def printed(attempt: int) -> list[str]:
    """What the launcher of an attempt prints, with Docker's times in front."""
    return [f"2026-01-01T00:{attempt:02}:00.{line:09}Z line {line} of attempt {attempt}" for line in range(LINES)]


def printed_by_rank(attempt: int) -> bytes:
    """What rank 0 of an attempt prints."""
    return b"".join(b"rank 0 prints %d in attempt %d\n" % (line, attempt) for line in range(LINES))


def carry(world: World, home: Path, lease: Lease, lock: LeaseLock) -> None:
    """A supervisor's whole life: `gpurun.supervisor.__main__`, in this process."""
    rest: tuple[Lease, LeaseLock] | None = (lease, lock)
    if not lease.lost:
        job = SupervisedJob(home, lease, lock)
        life.live(job)
        rest = job.lost
        again(home)
    if rest is not None:
        lost.keep_asking(home, *rest)
        again(home)


def again(home: Path) -> None:
    """The pass that follows the end of a job."""
    if not LeaseStore(home).read_all().damaged:
        spawn.Head(home, {}).run_pass(now_s=1e9)


class _NoEngine:
    """Every image is there."""

    def __init__(self, _host: object) -> None:
        pass

    def image(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(id="sha256:1")


def start_by(starts: Callable[[Path, Lease, LeaseLock], None]) -> None:
    """Have this process's gpurun start supervisors so."""
    spawn.Head.start_supervisor = lambda head, lease, lock, **_: starts(head.home, lease, lock)  # type: ignore[method-assign]


def _read(code: FileTree) -> bytes:
    return b"".join(piece for digest in code.files for piece in code.content(digest))


def install(world: World, starts: Any) -> None:
    """Have this process's gpurun act on the world. `starts(home, lease, lock)` starts a supervisor."""
    links = cached_property(lambda job: PowerLinks(world, job.hosts, job.lease))
    links.__set_name__(SupervisedJob, "links")
    SupervisedJob.links = links  # type: ignore[assignment]
    SupervisedJob.image_sets = frozenset()  # type: ignore[assignment]
    lost.Links = lambda _, hosts: PowerLinks(world, tuple(hosts))  # type: ignore[assignment,misc]
    prepare.examine = start.examine = lambda *_: None
    elsewhere.look_at = lambda _home, _inventory, hosts: dict.fromkeys(hosts)  # all answer by now
    prepare.ship_image = start.ship_image = lambda *_, **__: None
    prepare.stage_code = lambda code, *_, **__: SimpleNamespace(failed={}, read=_read(code))
    SupervisedJob.follow_log = lambda *_: None  # type: ignore[method-assign]
    stop._end_log = partial(end_log, world)
    lost.end_late_output = lambda *_: None
    life.STEPS = {**life.STEPS, State.RUNNING: partial(watch, world)}
    start_by(starts)
    submit.Engine = _NoEngine  # type: ignore[assignment,misc]
    spawn.Head.ensure_waiter = lambda *_: False
