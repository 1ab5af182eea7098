"""Whatever became of a state file: every command answers in time, nothing is deleted, no GPU of it is given away."""

from __future__ import annotations

import io
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import typer
from hypothesis import given
from mutations import damaged_bytes, damaged_json, examples

from gpurun.cli import main as command_line
from gpurun.errors import GpurunError
from gpurun.head import children
from gpurun.inventory.change import Author, History
from gpurun.jobs.events import EventLog
from gpurun.jobs.record import ID_PATTERN, CancelRequest, FirstFailure, Restart, Setback, State
from gpurun.jobs.spec import Constraints, HorovodKnobs, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.state.audit import AuditLog
from gpurun.state.hosts import Cordon, Cordons

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-3]": {}}}}
"""
FILES = (
    "leases/RUNS.json", "leases/LOST.1.lost.json", "jobs/RUNS/spec.json", "jobs/RUNS/state.json", "jobs/RUNS/plan.json",
    "jobs/RUNS/cancel.json", "jobs/RUNS/preempt.json", "jobs/RUNS/events.jsonl", "jobs/RUNS/log",
    "jobs/RUNS/supervisor.log",
    "jobs/RUNS/launch.jsonl",
    "jobs/WAITS/spec.json", "jobs/WAITS/state.json", "jobs/LOST/state.json", "jobs/LOST/spec.json", "live/RUNS",
    "cordons.json", "deadlines.json",
    "locks.json", "allocator.lock", "audit.jsonl", "waiters/0.log", "inventory/HISTORY/000001.json",
    "bench/links.jsonl",
)  # fmt: skip
COMMANDS = (
    ("status",), ("status", "--json"), ("status", "--all"), ("status", "RUNS"), ("status", "LOST", "--json"),
    ("queue",),
    ("queue", "--json"), ("why", "WAITS"), ("why", "RUNS"), ("recover",), ("recover", "--json"), ("logs", "RUNS"),
    ("logs", "RUNS", "-t"), ("logs", "RUNS", "--rank", "0"), ("audit",), ("audit", "--json"), ("audit", "--job",
    "RUNS"),
    ("cancel", "--no-wait", "RUNS"), ("cancel", "--no-wait", "WAITS"), ("cancel", "--no-wait", "LOST"),
    ("wait", "RUNS", "WAITS", "--timeout", "0"), ("inventory", "list"), ("inventory", "show"), ("inventory", "diff",
    "--all"),
    ("inventory", "cordon", "h3"), ("inventory", "uncordon", "h1"), ("recover", "--discard", "RUNS.json"),
    ("inventory", "drain", "h1"), ("inventory", "drain", "h2", "--deadline", "1h"),
)  # fmt: skip
CODES = (0, 1, 2, 4, 5, 124)
EXAMPLE_S = 100
NEVER_WRITTEN_AGAIN = ("jobs/RUNS/spec.json", "jobs/RUNS/plan.json", "jobs/LOST/spec.json", "jobs/WAITS/spec.json")


class Home:
    """A state directory with one of everything; each example works on a copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "inventory.yaml").write_text(INVENTORY)
        self.home = folder / "template"
        self.names: dict[str, str] = {}
        self._fill()

    def path(self, file: str, home: Path) -> Path:
        return home / self.told(file)

    def told(self, text: str) -> str:
        for word, name in self.names.items():
            text = text.replace(word, name)
        return text

    def contents(self) -> list[bytes]:
        return [self.path(file, self.home).read_bytes() for file in FILES]

    def _fill(self) -> None:
        home, store, leases = self.home, JobStore(self.home), LeaseStore(self.home)
        spec = JobSpec(
            name="n", image="i", gpus=2, command=("python3", "train.py"), env={"A": "b"}, outputs="/out",
            max_restarts=3,
            constraints=Constraints(generations=("pascal",), avoid=("h9",)), horovod=HorovodKnobs(autotune=True),
        )  # fmt: skip
        for at, word in enumerate(("RUNS", "LOST", "WAITS")):
            self.names[word] = store.create(spec, inventory=self.folder / "inventory.yaml", now_s=1000.0 + at).id
        with Cordons(home).changing() as cordons:
            cordons["h3"] = Cordon("cordoned", "me", 1.0, "a reason", "evidence")
            cordons["h9"] = Cordon("draining", "me", 1.0, "a reason", until_s=2e9)
        granted = {lease.job: (lease, lock) for lease, lock in Allocator(home).run_pass(now_s=1010.0).granted}
        lease, lock = granted[self.names["LOST"]]
        _, lock = leases.abandon(lock, lease, {lease.grants[0].host})
        lock.close()
        granted[self.names["RUNS"]][1].close()
        failure = FirstFailure("it failed", 0, "h1", 1, ("a line",), "rank", "Xid 79")
        lost = store.get(self.names["LOST"])
        lost.move(State.STOPPING, outcome=State.QUEUED, first_failure=failure, restarts=1, avoid=("h2",),
                  restart=Restart(2e9, 2, 4), setback=Setback(1, "rank", "", 0, 1, 3, 10.0))  # fmt: skip
        lost.move(State.QUEUED, granted=(), outcome=None)
        runs = store.get(self.names["RUNS"])
        for state in (State.PREPARING, State.STARTING, State.RUNNING):
            runs.move(state, started_s=1020.0)
        self._fill_rest(runs.path.plain)

    def _fill_rest(self, runs: Path) -> None:
        home = self.home
        events = EventLog(JobStore(home).get(self.names["RUNS"]).events, clock=lambda: 1020.0)
        events.emit("placement", generation="pascal", racks=["r1"], hosts=[{"host": "h1", "gpus": [0, 1]}])
        events.emit("state", state="RUNNING", attempt=1, reason="")
        events.emit("host", host="h1", state="unreachable", reason="why")
        for kind in ("preempt", "cancel"):
            JobStore(home).get(self.names["RUNS"]).ask_to_cancel(CancelRequest(kind, "me", 1.0, "because"))
        (runs / "log").write_text(
            "2026-01-01T00:00:00.000000001Z o [0]<stdout>:a line\n2026-01-01T00:00:01Z e another\n"
        )
        (runs / "plan.json").write_text('{"job": "x", "hosts": []}')
        (runs / "launch.jsonl").write_text('{"t": 1.0, "kind": "x"}\n')
        (runs / "supervisor.log").write_text("Traceback\nSomething: went wrong\n")
        (home / "waiters").mkdir()
        (home / "waiters" / "0.log").touch()
        AuditLog(home).note("grant", job=self.names["RUNS"], hosts=["h1"])
        history = History(home, self.folder / "inventory.yaml")
        history.record(b"old", INVENTORY.encode(), Author("me", "gpurun inventory set", 1.0))
        self.names["HISTORY"] = history.folder.name
        (home / "bench").mkdir()
        (home / "bench" / "links.jsonl").write_text('{"time_s": 1.0, "links": [["h1", "h2", 9.1, 20.0]]}\n')

    @contextmanager
    def copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            home = Path(folder) / "home"
            shutil.copytree(self.home, home)
            os.environ["GPURUN_HOME"] = str(home)
            yield home


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state directory, and a gpurun that starts no processes and builds its command line once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        nobody = SimpleNamespace(Popen=lambda *_, **__: None, DEVNULL=subprocess.DEVNULL)
        patch.setattr(children, "subprocess", nobody)
        patch.setattr(command_line, "app", typer.main.get_command(command_line.app))
        patch.setenv("GPURUN_INVENTORY", str(folder / "inventory.yaml"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("GPURUN_HOME", str(folder / "template"))
        yield Home(folder)


@contextmanager
def in_time(seconds: int = EXAMPLE_S) -> Iterator[None]:
    def too_slow(*_: object) -> None:
        raise AssertionError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def talking() -> Iterator[None]:
    """Standard streams as a terminal's, which refuse to print what is no text."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with redirect_stdout(out), redirect_stderr(err):
        yield
        out.flush()


def run(state: Home, words) -> int:
    """A command in this process; what is not an exit is a traceback, and fails the test."""
    with talking(), pytest.raises(SystemExit) as ended:
        command_line.main([state.told(word) for word in words])
    assert ended.value.code in CODES, (words, ended.value.code)
    return ended.value.code


def gpus_in(home: Path) -> set[tuple[str, int]]:
    leases = LeaseStore(home).read_all().leases
    return {(grant.host, gpu) for lease in leases for grant in lease.grants for gpu in grant.gpus}


def nothing_is_given_away(home: Path, before: set[tuple[str, int]]) -> None:
    """Somebody asks for a GPU: whoever gets one, it is none that a lease had, and none if a lease is damaged."""
    damaged = LeaseStore(home).read_all().damaged
    granted: list[tuple[object, LeaseLock]] = []
    with suppress(GpurunError):
        granted = [*Allocator(home).run_pass(now_s=5000.0).granted]
    for _, lock in granted:
        lock.close()
    new = {(grant.host, gpu) for lease, _ in granted for grant in lease.grants for gpu in grant.gpus}
    assert not (damaged and granted)
    assert not new & before


def check(state: Home, file: str, data: bytes, commands) -> None:
    with state.copy() as home, in_time():
        path = state.path(file, home)
        path.write_bytes(data)
        for words in commands:
            before = gpus_in(home)
            damaged = {error.where for error in LeaseStore(home).read_all().damaged}
            run(state, words)
            if words[:2] != ("recover", "--discard"):
                assert all(os.path.lexists(lease) for lease in damaged)
            if file.startswith("leases/") and words[:2] != ("recover", "--discard"):
                assert before <= gpus_in(home), "a lease went away"
            nothing_is_given_away(home, before)
        if file in NEVER_WRITTEN_AGAIN:
            assert path.read_bytes() == data
        if not file.startswith(("leases/", "live/", "waiters/", "jobs/RUNS/cancel", "jobs/RUNS/preempt")):
            assert path.exists()


@st.composite
def damage(draw: st.DrawFn, state: Home):
    """A file and what became of it."""
    file = draw(st.sampled_from(FILES))
    own = [state.path(file, state.home).read_bytes()]
    if file.endswith((".json", ".jsonl")) and draw(st.booleans()):
        return file, draw(damaged_json(own))
    return file, draw(damaged_bytes([*own, *state.contents()]) if draw(st.booleans()) else damaged_bytes(own))


@pytest.mark.timeout(3600)
def test_a_damaged_file_stops_no_command_and_frees_no_gpu(state):
    @examples("damaged state files")
    @given(damage(state), st.lists(st.sampled_from(COMMANDS), min_size=3, max_size=3, unique=True))
    def fuzz(damaged, commands):
        check(state, *damaged, commands)

    fuzz()


NAMES = st.sampled_from([
    b"x", b"j-00000000", b"j-00000000.json", b"j-0000000g.json", b".tmp", b".x.tmp", b"\xff\xfe", b"\xff.json",
    b"a b'\"$(x)\n",
    b"\x1b[2J", "\u202e".encode(), b"-rf", b"x" * 255, b"99999999999999999999999999", "\u0663".encode(), b"0", b"-1",
    b"j-00000000.99999999.lost.json",
    b"j-00000000.0", b"j-00000000.x", b".new-j-00000000-1",
])  # fmt: skip
FOLDERS = st.sampled_from(["leases", "jobs", "live", "waiters", "inventory/HISTORY", "bench", "jobs/RUNS", "."])
KINDS = st.sampled_from(["file", "folder", "link", "pipe", "socket"])


@pytest.mark.timeout(3600)
def test_a_foreign_name_stops_no_command(state):
    @examples("foreign names")
    @given(FOLDERS, NAMES, KINDS, st.lists(st.sampled_from(COMMANDS), min_size=3, max_size=3, unique=True))
    def fuzz(folder, name, kind, commands):
        with state.copy() as home, in_time():
            path = home / state.told(folder) / os.fsdecode(name)
            with suppress(FileExistsError):
                put(path, kind)
            for words in commands:
                before = gpus_in(home)
                run(state, words)
                nothing_is_given_away(home, before)
            is_mark = folder == "live" and ID_PATTERN.fullmatch(path.name)  # as a killed submission leaves it
            assert os.path.lexists(path) or folder == "leases" or is_mark

    fuzz()


def put(path: Path, kind: str) -> None:
    if kind == "file":
        path.touch(exist_ok=False)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/nowhere")
    else:
        os.mknod(path, 0o600 | (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK))
