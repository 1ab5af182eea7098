"""Root ends every job whose owner has no account, and only with an inventory that only root can change."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from users import ALICE, BOB, GROUP, NEEDS_OPEN_PYTHON, left_over, make_user, open_folder, open_python
from waiting import LIMIT_S

from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.head import children, spawn
from gpurun.head import spawn as takeover
from gpurun.head.claims import Claims
from gpurun.head.spawn import Head
from gpurun.head.waiter import owners
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.store import JobStore
from gpurun.leases.look import look
from gpurun.leases.store import LeaseStore
from gpurun.state import durable
from gpurun.state.audit import AuditLog
from gpurun.state.paths import StatePath, not_only_root_s, only_root_s
from gpurun.state.sharing import StateDirectory, append_only

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or open_python() is None, reason=f"needs root; {NEEDS_OPEN_PYTHON}")

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {address: 10.0.0.1}, h2: {address: 10.0.0.2}}}}
"""
OTHER_NAMES = INVENTORY.replace("h1:", "gpu-a:").replace("h2:", "gpu-b:")
GRANT = """
import os, sys, time
from pathlib import Path
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.state.sharing import StateDirectory
home = Path(os.environ["GPURUN_HOME"])
StateDirectory(home).enter()
spec = JobSpec(name="n", image="i", gpus=8, command=("true",))
job = JobStore(home).create(spec, inventory=home.parent / "alices.yaml", now_s=1.0)
held = Allocator(home).run_pass(now_s=2.0).granted
print(job.id, flush=True)
"""


@pytest.fixture
def world(monkeypatch):
    """A job of a user without an account, with a lease that nobody carries; which keepers root starts instead."""
    with open_folder() as top:
        for name in ("alices.yaml", "root.yaml"):
            (top / name).write_text(INVENTORY)
        (top / "names.yaml").write_text(OTHER_NAMES)
        (top / "elsewhere.yaml").write_text(INVENTORY.replace("10.0.0.2", "10.0.0.9"))
        os.chown(top / "alices.yaml", ALICE, ALICE)
        home = top / "state"
        StateDirectory(home).make_shared(GROUP)
        started = []
        monkeypatch.setattr(
            children, "subprocess", SimpleNamespace(DEVNULL=None, Popen=lambda argv, **_: started.append(argv[3]))
        )
        monkeypatch.setattr(takeover, "KILL_S", LIMIT_S)
        alice, bob = (make_user(uid, top, home) for uid in (ALICE, BOB))
        yield SimpleNamespace(top=top, home=home, alice=alice, bob=bob, started=started, leases=LeaseStore(home))
        for pid in left_over(home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        append_only(StatePath(home) / "audit.jsonl", on=False)


@pytest.fixture
def job(world):
    return JobStore(world.home).get(world.alice.python(GRANT))


def end(world, job, inventory="root.yaml"):
    Head(world.home, {}).take_over(job, load_inventory(world.top / inventory))


def is_untouched(world, job):
    lease = world.leases.read(job.id)
    return lease.owner_uid == ALICE and not lease.lost and job.record().state is State.GRANTED and world.started == []


def test_its_gpus_stay_taken_until_root_has_fenced_them(world, job):
    end(world, job)
    assert job.record().state is State.CANCELLED
    assert "no account" in job.record().reason
    assert world.started == [f"{job.id}.1.lost"], "the keeper of root's lost lease"
    lease = world.leases.read(f"{job.id}.1.lost")
    assert (lease.owner_uid, lease.inventory, lease.lost) == (0, str(world.top / "root.yaml"), True)
    assert lease.found, "nobody brought the outputs home: the fence keeps them"
    assert world.leases.path(lease.name).stat().st_uid == 0, "a process that the owner left can hold no lock on it"
    assert look(world.home, now_s=3.0).occupancy.taken(load_inventory(world.top / "root.yaml")) == {
        "h1": (0, 1, 2, 3), "h2": (0, 1, 2, 3),
    }  # fmt: skip
    (entry,) = (each for each in AuditLog(world.home).read() if each["what"] == "take over")
    assert (entry["job"], entry["uid"], entry["hosts"]) == (job.id, 0, ["h1", "h2"])
    assert not (world.home / "live" / job.id).exists()


def test_recover_finds_the_keeper_s_lease_after_a_crash(world, job):
    end(world, job)
    world.started.clear()
    assert spawn.Head(world.home, {}).adopt_orphans() == (job.id,)
    assert world.started == [f"{job.id}.1.lost"]
    assert list(Claims(world.home).forged_leases()) == []


def test_ending_it_twice_changes_nothing(world, job):
    end(world, job)
    before = job.record(), world.leases.read_all().leases
    end(world, job)
    assert (job.record(), world.leases.read_all().leases) == before


def test_a_crash_between_the_lease_and_the_record_is_made_good(world, job, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(takeover, "_end_of_takeover", crash)
        end(world, job)
    assert not job.record().state.ended
    end(world, job)
    assert job.record().state is State.CANCELLED
    assert Head(world.home).held_by(job.id) == ("h1", "h2")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_supervisor_that_lives_is_killed_also_one_that_is_stopped(world, stopped):
    process = world.alice.start("-c", GRANT + "time.sleep(600)")
    job = JobStore(world.home).get(process.stdout.readline().strip())
    if stopped:
        process.send_signal(signal.SIGSTOP)
    end(world, job)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    assert job.record().state is State.CANCELLED


def test_only_the_owner_s_processes_are_killed(world, job, monkeypatch):
    """Another user who read-locks the lease is named, and nothing is half done."""
    monkeypatch.setattr(takeover, "KILL_S", 0.5)
    code = f"""
import fcntl, os, struct, time
stream = open({str(world.leases.path(job.id))!r}, "rb")
fcntl.fcntl(stream, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
print("locked", flush=True)
time.sleep(600)
"""
    process = world.bob.start("-c", code)
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(StateUnavailable, match=f"pid {process.pid}"):
        end(world, job)
    assert process.poll() is None
    assert is_untouched(world, job)


@pytest.mark.parametrize("change", ["owner", "group may write", "all may write", "folder", "link", "gone"])
def test_an_inventory_that_others_can_change_is_refused(world, job, change):
    """It names an `ssh_config`, which can run commands: as root."""
    path = world.top / "root.yaml"
    inventory = load_inventory(path)
    if change == "owner":
        os.chown(path, BOB, BOB)
    elif change == "folder":
        world.top.chmod(0o777)
    elif change == "link":
        path.unlink()
        path.symlink_to(world.top / "alices.yaml")
    elif change == "gone":
        path.unlink()
    else:
        path.chmod(0o664 if change == "group may write" else 0o666)
    with pytest.raises(BadInput, match="users other than root can change"):
        Head(world.home, {}).take_over(job, inventory)
    assert is_untouched(world, job)


def test_hosts_are_found_by_their_address_not_by_the_owner_s_names(world, job):
    end(world, job, "names.yaml")
    lease = world.leases.read(f"{job.id}.1.lost")
    assert [grant.host for grant in lease.grants] == ["gpu-a", "gpu-b"]
    assert lease.machines == {"gpu-a": "10.0.0.1:22", "gpu-b": "10.0.0.2:22"}


def test_an_inventory_without_one_of_the_machines_is_refused(world, job):
    """A host of that name with another address is another machine: a fence there would prove nothing."""
    with pytest.raises(BadInput, match=r"the job holds GPUs on 10\.0\.0\.2:22"):
        end(world, job, "elsewhere.yaml")
    assert is_untouched(world, job)


@pytest.mark.parametrize("outcome", [State.SUCCEEDED, State.QUEUED])
def test_an_end_that_was_decided_stays(world, job, outcome):
    job.move(State.STOPPING, outcome=outcome, reason="decided", code=0)
    from gpurun.jobs.record import CancelRequest

    job.ask_to_cancel(CancelRequest("cancel", by="root", asked_s=3.0, reason="r"))
    end(world, job)
    assert job.record().state is (State.SUCCEEDED if outcome is State.SUCCEEDED else State.CANCELLED)


def test_a_lost_lease_of_a_job_that_has_ended_is_taken_over(world, job):
    lease = world.leases.read(job.id)
    lock = world.leases.try_lock(job.id)
    lost, lock = world.leases.abandon(lock, lease, {"h2"})
    os.chown(world.leases.path(lost.name).plain, ALICE, -1)
    lock.close()
    job.move(State.STOPPING, outcome=State.FAILED)
    from gpurun.jobs.store import finish

    finish(JobStore(world.home), job.record(), now_s=4.0)
    assert Head(world.home).ownerless_jobs() == {ALICE: (job.id,)}
    assert owners(world.home) == (ALICE,), "root's recovery of everybody has its keeper started, too"
    end(world, job)
    assert Head(world.home).held_by(job.id) == ("h2",)
    assert world.leases.read(lost.name).owner_uid == 0
    assert world.started == [lost.name]
    assert job.record().state is State.FAILED


def test_a_lease_that_its_owner_removed_is_taken_over(world, job):
    world.leases.path(job.id).unlink()
    end(world, job)
    assert Head(world.home).held_by(job.id) == ("h1", "h2")


def test_links_that_its_owner_left_lead_nowhere(world, job):
    victim = world.top / "victim"
    victim.write_text("root's\n")
    for name in ("events.jsonl", "supervisor.log"):
        (job.path / name).unlink(missing_ok=True)
        (job.path / name).plain.symlink_to(victim)
    end(world, job)
    assert victim.read_text() == "root's\n"
    assert job.record().state is State.CANCELLED


def test_a_damaged_record_is_named_and_nothing_changes(world, job):
    (job.path / "state.json").plain.write_text("{")
    with pytest.raises(StateError, match="not a valid JobRecord"):
        end(world, job)
    assert world.leases.read(job.id).owner_uid == ALICE


def test_a_lease_of_root_s_with_an_inventory_that_others_can_change_is_not_adopted(world, job):
    """Root owns many files whose content others chose; one of them, moved into the folder, must run nothing."""
    lease = replace(world.leases.read(job.id), owner="root", owner_uid=0, lost=True)
    Claims(world.home).check_lease(replace(lease, inventory=str(world.top / "root.yaml")))
    with pytest.raises(StateError, match="may be forged"):
        Claims(world.home).check_lease(lease)
    with pytest.raises(StateError, match="may be forged"):
        Claims(world.home).check_lease(replace(lease, lost=False, inventory=str(world.top / "root.yaml")))


def test_the_command_ends_queued_jobs_and_needs_no_inventory_for_them(world):
    job = JobStore(world.home).get(world.alice.python(GRANT.replace("gpus=8", "gpus=800")))
    said = cancel(world, job.id)
    assert (said.returncode, job.record().state) == (0, State.CANCELLED), said.stderr


def test_the_command_names_the_next_step_without_an_inventory(world, job):
    """The owner's inventory, which the record names, is never used."""
    said = cancel(world, job.id, "--no-wait")
    assert said.returncode == 2, said.stderr
    assert "--inventory" in said.stderr
    assert not job.record().state.ended
    said = cancel(world, job.id, "--no-wait", "-i", str(world.top / "alices.yaml"))
    assert said.returncode == 2, said.stderr
    assert "users other than root can change" in said.stderr
    assert Head(world.home).held_by(job.id) == ("h1", "h2")


def test_recover_names_the_jobs_and_the_command_that_ends_them(world, job):
    said = gpurun(world, "recover")
    assert f"as root, run `gpurun cancel {job.id}`" in said.stderr
    assert job.record().state is State.GRANTED


def test_another_user_s_cancel_stays_refused(world, job):
    done = world.bob.gpurun("cancel", job.id, "-i", str(world.top / "root.yaml"))
    assert done.returncode == 2
    assert "only the owner and root" in done.stderr
    assert is_untouched(world, job)


def gpurun(world, *args):
    root = replace(world.alice, uid=0, groups=())
    environ = {**root.environ, "HOME": str(world.top), "GPURUN_HOME": str(world.home)}
    return replace(root, environ=environ).gpurun(*args)


def cancel(world, *args):
    return gpurun(world, "cancel", *args)


def test_which_folders_of_a_search_path_are_root_s_alone(world):
    open_one = world.top / "open"
    open_one.mkdir()
    open_one.chmod(0o777)
    mine = world.top / "mine"
    mine.mkdir()
    assert not_only_root_s(mine) is None
    assert not_only_root_s(open_one) == open_one
    assert not_only_root_s(open_one / "below") is not None
    assert only_root_s(f"{open_one}:{mine}::relative:{world.top}/nowhere:'; echo") == str(mine)
    loop = world.top / "loop"
    loop.symlink_to(loop)
    assert not_only_root_s(loop) is not None


def test_a_damaged_lease_is_named_with_the_way_out(world, job):
    durable.write_bytes(world.leases.path(job.id), b"{", mode=0o600)
    with pytest.raises(StateError, match="not a valid Lease") as refused:
        end(world, job)
    assert "gpurun recover" in refused.value.hint
    assert world.started == []
    assert job.record().state is State.GRANTED


def test_root_has_a_supervisor_started_as_the_owner_who_has_an_account(world, job, monkeypatch):
    from gpurun.cli import cancel as command
    from gpurun.head import waiter

    asked, answers = [], [waiter.Recovered("alice"), waiter.Recovered("alice", problem="alice: no SSH key")]
    monkeypatch.setattr(waiter, "recover_as", lambda uid, home, _: (asked.append((uid, home)), answers.pop(0))[1])
    command._have_it_carried(job)
    with pytest.raises(StateError, match="no SSH key"):
        command._have_it_carried(job)
    assert asked == [(ALICE, world.home)] * 2
    lock = world.leases.try_lock(job.id)
    command._have_it_carried(job)
    assert len(asked) == 2, "a supervisor that lives needs no other one"
    lock.close()
    assert is_untouched(world, job)
