"""A pass that fails in a process that lives on: it keeps no lease's lock, and each job gets its supervisor."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpurun
from gpurun.errors import StateDiskError, StateError, StateUnavailable
from gpurun.head import children, spawn, waiter
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases import allocate
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import LeaseStore
from gpurun.state import durable
from gpurun.state.audit import AuditLog
from gpurun.state.hosts import Cordon, Cordons

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: e}
fabrics: {e: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}, h2: {}}}}
"""
FULL = StateDiskError("cannot be written: the disk of the state directory is full")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A home with an inventory, and what was started. `fails` is how many further starts fail."""
    seen = SimpleNamespace(home=tmp_path / "home", started=[], fails=0, held=[])

    def popen(argv, *, pass_fds, **_):
        if seen.fails:
            seen.fails -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        seen.started.append(argv[3] if argv[2] == "gpurun.supervisor" else "waiter")
        seen.held.append(os.dup(pass_fds[0]))

    monkeypatch.setattr(children, "subprocess", SimpleNamespace(DEVNULL=None, Popen=popen))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    yield seen
    for descriptor in seen.held:
        os.close(descriptor)


def queue(world, count):
    specs = [JobSpec("n", "i", 4, ("true",))] * count
    inventory = world.home.parent / "inventory.yaml"
    return [folder.id for folder in JobStore(world.home).create_many(specs, inventory=inventory, now_s=1.0)]


def go(world):
    return spawn.Head(world.home, {}).run_pass(now_s=2.0)


def nth_call_fails(monkeypatch, owner, name, number, error=FULL):
    real, calls = getattr(owner, name), []

    def call(*arguments, **named):
        calls.append(name)
        if len(calls) == number:
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name"), [(allocate, "mark_granted"), (AuditLog, "note"), (durable, "write_locked_record")]
)
def test_a_pass_that_fails_half_way_starts_what_it_has_granted(world, monkeypatch, owner, name, number):
    jobs = queue(world, 2)
    with monkeypatch.context() as patch:
        nth_call_fails(patch, owner, name, number)
        if name == "write_locked_record":
            go(world)  # a grant that is refused costs nobody else a grant
        else:
            with pytest.raises(StateDiskError):
                go(world)
    first = list(world.started)
    assert first, "what was granted has its supervisor"
    spawn.Head(world.home, {}).adopt_orphans()
    go(world)
    assert sorted(set(world.started) - {"waiter"}) == sorted(jobs)
    assert all(LeaseStore(world.home).is_alive(job) for job in jobs)


def test_a_lease_whose_folder_could_not_be_synced_is_an_orphan_not_lost(world, monkeypatch):
    (job,) = queue(world, 1)
    LeaseStore(world.home).folder.plain.mkdir()
    with monkeypatch.context() as patch:
        nth_call_fails(patch, durable, "sync_folder", 3)  # the folder itself, the folder before, and after the lease
        go(world)
    assert world.started == []
    assert spawn.Head(world.home, {}).adopt_orphans() == (job,)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_supervisor_that_cannot_start_keeps_no_other_from_it_and_is_adopted(world, fails):
    jobs = queue(world, 2)
    world.fails = fails
    with pytest.raises(StateUnavailable, match="gpurun could not start a process"):
        go(world)
    assert world.started[:-1] == jobs[fails:]
    assert world.started[-1] == "waiter", "somebody must look after the other one"
    spawn.Head(world.home, {}).adopt_orphans()
    assert sorted(set(world.started) - {"waiter"}) == sorted(jobs)


def test_a_waiter_is_needed_as_long_as_a_granted_job_has_no_supervisor(world):
    (job,) = queue(world, 1)
    world.fails = 2  # the supervisor and the waiter
    with pytest.raises(StateUnavailable):
        go(world)
    assert JobStore(world.home).get(job).record().state is State.GRANTED
    assert waiter.Waiter(world.home).is_needed(os.getuid())
    waiter.Waiter(world.home, {}).resume()
    assert world.started == [job]
    assert not waiter.Waiter(world.home).is_needed(os.getuid())


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_pass_keeps_no_lock(world, monkeypatch, end):
    jobs = queue(world, 2)
    with monkeypatch.context() as patch:
        nth_call_fails(patch, allocate, "mark_granted", 2, end())
        with pytest.raises(end):
            go(world)
    assert not any(LeaseStore(world.home).is_alive(job) for job in jobs)
    assert set(spawn.Head(world.home, {}).adopt_orphans()) == set(jobs)


def test_a_change_of_a_lease_that_fails_loses_no_lock(world, monkeypatch):
    (job,) = queue(world, 1)
    ((lease, lock),) = Allocator(world.home).run_pass(now_s=2.0).granted
    leases = LeaseStore(world.home)
    for name in ("write_locked_record", "sync_folder"):
        with monkeypatch.context() as patch:
            nth_call_fails(patch, durable, name, 1)
            if name == "sync_folder":
                leases.change(lock, lease)
            else:
                with pytest.raises(StateDiskError):
                    leases.change(lock, lease)
        assert lock.is_current() and leases.is_alive(job)
        assert spawn.Head(world.home, {}).adopt_orphans() == ()
    lock.close()
    lock.close()
    assert not leases.is_alive(job)


def test_what_is_kept_for_a_job_is_not_written_over_an_edit(world, monkeypatch):
    """Somebody edits the record of a queued job, in the moment in which a pass notes what it keeps for the job."""
    queue(world, 2)
    (later,) = queue(world, 1)
    store = JobStore(world.home)
    real = allocate.schedule

    def scheduled(seen):
        answer = real(seen)
        store.get(later).write(store.get(later).record().but(priority=7))
        kept = next(iter(answer.starts))[1]
        answer.kept[later] = allocate.Kept(kept, "patience")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(allocate, "schedule", scheduled)
        go(world)
    assert (store.get(later).record().priority, store.get(later).record().kept) == (7, None)


# -- a waiter


@pytest.fixture
def looks(monkeypatch):
    """A waiter without pauses; what its looks at the queue do, in turn."""
    monkeypatch.setattr(waiter, "TICK_S", 0.0)
    monkeypatch.setattr(waiter, "AGAIN_FIRST_S", 0.0)
    monkeypatch.setattr(waiter, "PASS_EVERY_S", 0.0)


EMFILE = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("error", [EMFILE, StateUnavailable("too many open files"), StateError("a lease is damaged"),
                                   ZeroDivisionError("a defect")])  # fmt: skip
@pytest.mark.parametrize(
    ("owner", "name"),
    [(waiter.Waiter, "_stamps"), (waiter.Waiter, "is_needed"), (waiter.Waiter, "_try_in_s"),
     (waiter.Head, "adopt_orphans"), (waiter.Head, "run_pass")],
)  # fmt: skip
def test_no_error_ends_a_waiter(world, looks, monkeypatch, capfd, owner, name, error):
    (job,) = queue(world, 1)
    nth_call_fails(monkeypatch, owner, name, 1, error)
    waiter.Waiter(world.home, {}).wait_for_queue()
    assert world.started == [job]
    assert str(error) in capfd.readouterr().err


@pytest.mark.parametrize("name", ["release_lock", "try_take"])
def test_no_error_keeps_a_waiter_from_its_last_look(world, looks, monkeypatch, own_copy, name):
    descriptor, _ = spawn.WaiterLocks(world.home).take()
    own_copy(waiter, "locks")
    nth_call_fails(monkeypatch, waiter.locks, name, 1, EMFILE)
    later = [queue, lambda *_: None]
    real = waiter.Waiter.is_needed

    def needed(home, uid):
        found = real(home, uid)
        if later:
            later.pop(0)(world, 1)
        return found

    monkeypatch.setattr(waiter.Waiter, "is_needed", needed)
    waiter.Waiter(world.home, {}).hold(descriptor)
    assert len(world.started) == 1, "a job that came in between was seen"
    os.close(descriptor)
    assert not WaiterLocks(world.home).lives(os.getuid())


# -- children


CHILD = """
import os, signal, sys, time
from pathlib import Path
from gpurun.head import children
from gpurun.jobs.spec import NotifyWish
from gpurun.notify import NotSent, send
children.live_on()
try:
    send(NotifyWish(kind="command", target="/bin/false", on=("end",)), {"event": "end"}, sleep=lambda _: None)
except NotSent as error:
    print(error)
lock = os.open("/dev/null", os.O_RDONLY)
children.START = "until = {until}"
Popen = children.subprocess.Popen
def ended(*arguments, **named):
    process = Popen(*arguments, **named)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process
if sys.argv[1:] == ["quick"]:
    children.subprocess.Popen = ended
process = children.start_detached("this", home=Path("/"), environ=os.environ, lock=lock, log=1)
print(process.args[2:], flush=True)
while children._started:
    time.sleep(0.01)
print("reaped", process.returncode, signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN)
"""


@pytest.mark.parametrize("how", [[], ["quick"]], ids=["later", "before its start returns"])
def test_a_process_that_lives_on_hears_exit_codes_and_reaps_what_it_has_started(how):
    argv = [sys.executable, "-c", CHILD, *how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    first, *_, last = done.stdout.splitlines()
    assert first == "false ended with exit code 1"
    assert last.startswith("reaped 0") and last.endswith("True"), done.stdout + done.stderr


def test_a_child_that_ends_while_another_is_reaped_raises_nothing(monkeypatch):
    """The handler meets itself: its error would come up wherever the process just is."""

    class Ended:
        def __init__(self, others):
            self.others = others

        def poll(self):
            for _ in range(self.others):
                self.others -= 1
                children._started.append(Ended(0))
                children._reap()
            return 0

    monkeypatch.setattr(children, "_started", [Ended(2), Ended(2)])
    children._reap()
    assert children._started == []


def test_nothing_ignores_the_ends_of_its_children():
    sources = Path(gpurun.__file__).parent.rglob("*.py")
    assert [path for path in sources if "SIGCHLD, signal.SIG_IGN" in path.read_text()] == []
    assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN


def test_a_moment_without_descriptors_ends_no_waiter(world, looks, monkeypatch):
    """By the kernel's own limit, while a queued job waits."""
    (job,) = queue(world, 1)
    with Cordons(world.home).changing() as cordons:
        cordons.update({host: Cordon("cordoned", "x", 1.0, "x") for host in ("h1", "h2")})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    looked = []
    real = waiter.Waiter._stamps

    def stamps(home):
        looked.append(1)
        if len(looked) == 2:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        elif len(looked) > 4:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            with Cordons(world.home).changing() as cordons:
                cordons.clear()
        return real(home)

    monkeypatch.setattr(waiter.Waiter, "_stamps", stamps)
    try:
        waiter.Waiter(world.home, {}).wait_for_queue()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert world.started == [job]


def test_a_command_hears_exit_codes_whoever_started_it(real_starts):
    """A service manager, or a program that ignores the ends of its children, hands that on."""
    code = "import signal, os; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(PY, [PY, '-c', CODE])"
    inner = (
        "import signal, sys; from gpurun.cli.main import main\n"
        "try: main(['version'])\n"
        "except SystemExit: pass\n"
        "print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)"
    )
    code = code.replace("PY", repr(sys.executable)).replace("CODE", repr(inner))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == "True", done.stderr
