"""A state directory for several users: what one can do to another."""

from __future__ import annotations

import os
import signal
import stat
from types import SimpleNamespace

import pytest
from shared_code import PRELUDE, SUBMIT, needs_root
from users import ALICE, BOB, GROUP, make_user

from gpurun.errors import BadInput, StateError, StateUnavailable, UnsafeState
from gpurun.jobs.spec import Grant
from gpurun.state.audit import AuditLog
from gpurun.state.hosts import Cordon, Cordons
from gpurun.state.paths import StatePath
from gpurun.state.sharing import FILES, FOLDERS, StateDirectory, append_only

pytestmark = needs_root


def test_making_it_twice_changes_nothing(state):
    before = {name: (state / name).stat().st_ctime_ns for name in (*FOLDERS, *FILES)}
    StateDirectory(state).make_shared(GROUP)
    StateDirectory(state).enter()
    assert StateDirectory(state).is_shared()
    assert {name: (state / name).stat().st_ctime_ns for name in before} == before


@pytest.mark.parametrize("name", [".", *FOLDERS, *FILES])
def test_a_wrong_mode_is_refused_and_mended(state, name):
    append_only(StatePath(state) / "audit.jsonl", on=False)
    (state / name).chmod(0o2777)
    with pytest.raises(UnsafeState) as caught:
        StateDirectory(state).enter()
    assert caught.value.hint in (
        f"run as the owner of the directory: gpurun share {state} --group {GROUP}",
        f"run chmod o-w {state}",
    )
    StateDirectory(state).make_shared(GROUP)
    StateDirectory(state).enter()


def test_a_wrong_owner_group_or_kind_is_refused(state):
    os.chown(state / "leases", BOB, GROUP)
    (state / "leases").chmod(FOLDERS["leases"])
    with pytest.raises(UnsafeState, match=f"leases belongs to uid {BOB}"):
        StateDirectory(state).enter()
    os.chown(state / "leases", 0, 0)
    (state / "leases").chmod(FOLDERS["leases"])
    with pytest.raises(UnsafeState, match="leases belongs to group 0"):
        StateDirectory(state).enter()
    (state / "leases").rmdir()
    with pytest.raises(UnsafeState, match="leases is missing"):
        StateDirectory(state).enter()
    (state / "leases").symlink_to("/tmp")
    with pytest.raises(UnsafeState, match="leases is not the file or folder that gpurun made"):
        StateDirectory(state).enter()


def test_jobs_do_not_change_hands(tmp_path):
    (tmp_path / "jobs" / "j-0000000a").mkdir(parents=True)
    with pytest.raises(BadInput, match="already a state directory of one user"):
        StateDirectory(tmp_path).make_shared(GROUP)


def test_a_directory_that_everybody_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(UnsafeState, match="every user of this machine"):
        StateDirectory(tmp_path).enter()
    StateDirectory(tmp_path / "none").enter()


def test_a_place_that_can_be_no_directory_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path / "file" / "home", tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(StateError, match="cannot be examined"):
            StateDirectory(place).enter()


def test_a_private_directory_is_its_owner_s(tmp_path, bob):
    private = tmp_path / "private"
    private.mkdir()
    bob.environ["GPURUN_HOME"] = str(private)
    assert "UnsafeState" in bob.python(PRELUDE)
    assert "belongs to root" in bob.python(PRELUDE)


def test_who_is_not_in_the_group_is_told_so(stranger):
    said = stranger.python(PRELUDE)
    assert "you have no access to the state directory" in said
    done = stranger.gpurun("status")
    assert done.returncode == 5
    assert f"group {GROUP}" in done.stderr


ATTACKS = {
    "write another's record": "open(job / 'state.json', 'a')",
    "put a request into another's job": "open(job / 'cancel.json', 'w')",
    "remove another's job": "job.rename(home / 'jobs' / 'j-00000000')",
    "remove its mark of life": "(home / 'live' / job.name).unlink()",
    "remove its lease": "next((home / 'leases').iterdir()).unlink()",
    "rewrite its lease": "open(next((home / 'leases').iterdir()), 'a')",
    "move the lock of the cordons": "(home / 'cordons.lock').rename(home / 'cordons' / 'x')",
    "move the lock of the benchmarks": "(home / 'bench.lock').rename(home / 'bench' / 'x')",
    "replace the allocator lock": "(home / 'allocator.lock').unlink()",
    "replace a folder": "(home / 'leases').rename(home / 'gone')",
    "add a file beside": "open(home / 'x', 'w')",
    "rename the audit log": "(home / 'audit.jsonl').rename(home / 'requests' / 'x')",
    "empty the audit log": "open(home / 'audit.jsonl', 'w')",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_one_cannot_do_to_another(state, alice, bob, attack):
    if "audit" in attack and not append_only(StatePath(state) / "audit.jsonl", on=True):
        pytest.skip("needs append-only files: put TMPDIR on a disk with ext4, xfs or btrfs")
    job = alice.python(SUBMIT, umask=0o077)
    assert alice.python(PRELUDE + "print(len(Allocator(home).run_pass(now_s=2.0).granted))") == "1"
    said = bob.python(PRELUDE + f"job = home / 'jobs' / '{job}'\n" + attack)
    assert "PermissionError" in said


def test_what_members_can_do(state, alice, bob):
    """Also when one of them keeps the others out by habit (umask 077)."""
    job = alice.python(SUBMIT, umask=0o077)
    assert bob.python(PRELUDE + f"print(JobStore(home).get('{job}').record().owner_uid)") == str(ALICE)
    assert stat.S_IMODE((state / "jobs" / job / "state.json").stat().st_mode) == 0o640
    cordon = PRELUDE + "from gpurun.state.hosts import *\nwith Cordons(home).changing() as c:\n  "
    assert alice.python(cordon + "c['h1'] = Cordon('cordoned', 'a', 1.0, 'r')", umask=0o077) == ""
    assert bob.python(cordon + "print(c.pop('h1').reason)", umask=0o077) == "r"
    assert "'h1'" not in alice.python(cordon + "print(c)")


def test_root_sets_a_drains_deadline_and_members_read_it_set_none_and_may_end_the_drain(state, alice, bob):
    """A deadline ends jobs, which only their owners and root may."""
    cordon = PRELUDE + "from gpurun.state.hosts import *\n"
    change = cordon + "with Cordons(home).changing() as c:\n  "
    drained = "c['h1'] = Cordon('draining', 'root', 5.0, 'fan', until_s=%s)"
    root = make_user(0, state.parent, state)
    assert root.python(change + drained % 77.0) == ""
    assert alice.python(cordon + "print(Cordons(home).read()['h1'].until_s)", umask=0o077) == "77.0"
    assert alice.run("-c", change + drained % 1.0).returncode != 0
    assert bob.python(cordon + "print(Cordons(home).read()['h1'].until_s)") == "77.0"
    assert bob.python(change + "c.clear()") == ""
    assert bob.python(change + drained % None) == ""
    assert bob.run("-c", PRELUDE + "(home / 'deadlines.json').write_text('{}')").returncode != 0


def test_a_deadline_that_root_has_replaced_never_counts_again(state, alice):
    """Members may move the cordons away, and back."""
    cordon = PRELUDE + "from gpurun.state.hosts import *\n"
    drain = cordon + "with Cordons(home).changing() as c:\n  c['h1'] = Cordon('draining', 'root', %s, '', until_s=%s)"
    root = make_user(0, state.parent, state)
    assert root.python(drain % (5.0, 77.0)) == ""
    file = Cordons(state).file().plain
    assert alice.python(f"import os; os.rename('{file}', '{file}.kept')") == ""
    assert root.python(drain % (6.0, 5000.0)) == ""
    assert alice.python(f"import os; os.rename('{file}.kept', '{file}')") == ""
    assert root.python(cordon + "print(Cordons(home).read()['h1'].until_s)") == "None"


def test_a_member_who_gives_a_drain_another_reason_keeps_its_deadline(state, alice):
    put = PRELUDE + "from gpurun.state.hosts import *\nwith Cordons(home).changing() as c:\n  "
    put += "put_cordon(c, KnownAs('h1', 'h1:22'), Cordon('draining', %r, %s, %r, until_s=%s))"
    root = make_user(0, state.parent, state)
    assert root.python(put % ("root", 5.0, "fan", 77.0)) == ""
    assert alice.python(put % ("alice", 6.0, "disk", None)) == ""
    found = Cordons(state).read()["h1"]
    assert (found.reason, found.until_s) == ("disk", 77.0)


def test_one_members_drain_moves_another_s_gang_by_that_one_s_own_pass(alice, bob):
    job = bob.python(SUBMIT)
    granted = PRELUDE + "((lease, _),) = Allocator(home).run_pass(now_s=2.0).granted\nprint(lease.grants[0].host)"
    host = bob.python(granted)
    drain = "from gpurun.state.hosts import *\nwith Cordons(home).changing() as c:\n  "
    drain += f"c[{host!r}] = Cordon('draining', 'alice', 5.0, 'fan')\nAllocator(home).run_pass(now_s=6.0)"
    assert alice.python(PRELUDE + drain) == ""
    asked = f"\nprint(JobStore(home).get({job!r}).cancel_request())"
    assert bob.python(PRELUDE + asked) == "None"
    assert f"alice drains {host} (fan)" in bob.python(PRELUDE + "Allocator(home).run_pass(now_s=7.0)" + asked)


def test_the_line_holds_for_users_of_any_umask(alice, bob):
    """Alice's ticket keeps her place although her umask would hide it."""
    hold = PRELUDE + "with AllocatorLock(home).held(): print('held', flush=True); time.sleep(1.0)\nprint(time.time())"
    first = alice.start("-c", hold, umask=0o077)
    assert first.stdout.readline() == "held\n"
    second = bob.start("-c", hold, umask=0o077)
    assert second.stdout.readline() == "held\n"
    second.communicate()
    first.communicate()
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize("way", ["folder", "symlink"])
def test_nobody_can_have_something_run_as_somebody_else(state, alice, bob, way):
    """Bob makes a job that says it is alice's: her pass neither grants it nor stops for it."""
    bobs, alices = bob.python(SUBMIT), alice.python(SUBMIT)
    if way == "folder":
        forge = f"""
from dataclasses import replace
folder = JobStore(home).get("{bobs}")
folder.write(folder.record().but(owner_uid={ALICE}))
"""
    else:
        forge = f"(home / 'jobs' / 'j-0000000f').symlink_to('{alices}'); (home / 'live' / 'j-0000000f').touch()"
    assert bob.python(PRELUDE + forge) == ""
    assert (
        alice.python(PRELUDE + "print([l.job for l, _ in Allocator(home).run_pass(now_s=2.0).granted])")
        == f"['{alices}']"
    )


def test_a_name_means_ones_own_job_first(alice, bob):
    """Else a member chooses what another one runs again, or reads as data, by the name of a later job."""
    alices, bobs = alice.python(SUBMIT), bob.python(SUBMIT.replace("now_s=1.0", "now_s=2.0"))
    find = PRELUDE + "print(JobStore(home).find('n').id)"
    assert (alice.python(find), bob.python(find)) == (alices, bobs)
    other = bob.python(SUBMIT.replace('name="n"', 'name="m"'))
    assert alice.python(find.replace("'n'", "'m'")) == other


def test_a_lease_forged_in_another_s_name_is_not_adopted(state, alice, bob):
    job = alice.python(SUBMIT)
    alice.python(PRELUDE + "Allocator(home).run_pass(now_s=2.0)")
    forge = f"""
from dataclasses import replace
leases = LeaseStore(home)
lease = leases.read("{job}")
leases.grant(replace(lease, job="j-0000000f"), Occupancy())
"""
    assert bob.python(PRELUDE + forge) == ""
    adopt = PRELUDE + "from gpurun.head import spawn\nspawn.Head.start_supervisor = lambda *a, **k: None\n"
    assert alice.python(adopt + "print(spawn.Head(home, {}).adopt_orphans())") == f"('{job}',)"


def test_another_s_job_is_not_cancelled(state, alice, bob):
    job = alice.python(SUBMIT.replace("gpus=2", "gpus=100"))  # which waits for ever
    done = bob.gpurun("cancel", job)
    assert done.returncode == 2
    assert f"belongs to uid {ALICE}" in done.stderr
    assert f"ask the owner to run: gpurun cancel {job}" in done.stderr
    assert not (state / "jobs" / job / "cancel.json").exists()
    own = bob.python(SUBMIT.replace("gpus=2", "gpus=100"))
    assert bob.gpurun("cancel", own, job).returncode == 2
    assert not (state / "jobs" / own / "cancel.json").exists(), "nothing half done"
    assert alice.gpurun("cancel", job).returncode == 0


def test_only_root_and_its_owner_stop_a_sweep(state, tmp_path, alice, bob):
    """Without that, the sweep of a user who has left submits one job after the other."""
    folder = state / "sweeps" / "s-0000000a"
    assert alice.python(PRELUDE + "(home / 'sweeps' / 's-0000000a').mkdir()") == ""
    refused = bob.gpurun("sweep", "stop", folder.name)
    assert (refused.returncode, "belongs to another user" in refused.stderr) == (2, True)
    assert not (folder / "stop").exists()
    done = make_user(0, tmp_path, state).gpurun("sweep", "stop", folder.name)
    assert done.returncode == 0, done.stderr
    assert (folder / "stop").stat().st_uid == ALICE
    assert [(entry["uid"], entry["sweep"]) for entry in AuditLog(state).read() if entry["what"] == "sweep stop"] == [
        (0, folder.name)
    ]


def test_another_s_job_is_not_entered(alice, bob):
    """Who may use Docker on the hosts can do it there; gpurun is not the tool for it, and says so."""
    job = alice.python(SUBMIT.replace("gpus=2", "gpus=100"))
    done = bob.gpurun("exec", job, "--", "cat", "/run/secrets/token")
    assert done.returncode == 2
    assert f"belongs to uid {ALICE}; only the owner and root may run commands in it" in done.stderr
    assert "Docker" in done.stderr


HOLD = """
import os, sys, time
from pathlib import Path
from gpurun.state import locks
descriptor = os.open(Path(os.environ["GPURUN_HOME"]) / sys.argv[1], os.O_RDWR)
locks.take(descriptor)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["cordons.lock", "bench.lock"])
def test_a_member_who_holds_a_shared_lock_is_named_then_given_up_on(state, bob, monkeypatch, name):
    """Also when the member's process is stopped."""
    from gpurun.doctor.bench import BenchHistory, Run
    from gpurun.state import locks

    monkeypatch.setattr(locks, "PATIENCE_S", 0.2)
    holder = bob.start("-c", HOLD, name)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    umask = os.umask(0o027)
    with pytest.raises(StateUnavailable, match=f"uid {BOB}'s process {holder.pid}") as refused:
        if name == "bench.lock":
            BenchHistory(state).append(Run(1.0, ()))
        else:
            with Cordons(state).changing() as cordons:
                cordons["h1"] = Cordon("cordoned", "a", 1.0, "r")
    os.umask(umask)
    assert name in refused.value.hint
    assert Cordons(state).read() == {}
    holder.kill()
    holder.communicate()


def test_a_gang_s_gpus_do_not_wait_for_a_cordon(state, bob, monkeypatch):
    from gpurun.state import locks
    from gpurun.supervisor.stop import _cordon

    monkeypatch.setattr(locks, "PATIENCE_S", 0.2)
    holder = bob.start("-c", HOLD, "cordons.lock")
    assert holder.stdout.readline() == "held\n"
    notes = []
    lease = SimpleNamespace(grants=[Grant("h1", (0,))], machines={}, ids={})
    job = SimpleNamespace(home=state, note=notes.append, lease=lease, hardware={})
    umask = os.umask(0o027)
    assert not _cordon(job, {"h1": Cordon("lost", "gpurun", 1.0, "r")})
    assert f"process {holder.pid}" in notes[0]
    assert "gpurun inventory cordon" in notes[0]
    holder.kill()
    holder.communicate()
    assert _cordon(job, {"h1": Cordon("lost", "gpurun", 1.0, "r")})
    assert not _cordon(job, {"h1": Cordon("cordoned", "gpurun", 2.0, "another")}), "the first reason stays"
    os.umask(umask)
    assert Cordons(state).read()["h1"].reason == "r"


def test_garbage_of_one_does_not_stop_the_others(state, alice, bob):
    bobs = bob.python(SUBMIT)
    alice.python(SUBMIT)
    bob.python(PRELUDE + f"(home / 'jobs' / '{bobs}' / 'cancel.json').write_text('x')")
    assert alice.python(PRELUDE + "print(len(Allocator(home).run_pass(now_s=2.0).granted))") == "1"


def test_a_lock_in_another_s_name_means_nothing(state, alice, bob):
    """Bob makes alice's log before she does and locks it. She is not taken for looked after, and uses another file."""
    squat = f"""
from gpurun.state import locks
held = os.open(home / 'waiters' / '{ALICE}.log', os.O_RDWR | os.O_CREAT)
print(locks.try_take(held), flush=True); time.sleep(60)
"""
    bobs = bob.start("-c", PRELUDE + squat)
    assert bobs.stdout.readline() == "True\n"
    waiters = PRELUDE + "from gpurun.leases.look import WaiterLocks\n"
    assert bob.python(waiters + f"print(WaiterLocks(home).lives({ALICE}))") == "False"
    take = "held = WaiterLocks(home).take()\nprint(held[1].name, flush=True); time.sleep(60)"
    alices = alice.start("-c", waiters + take)
    assert alices.stdout.readline() != f"{ALICE}.log\n"
    assert bob.python(waiters + f"print(WaiterLocks(home).lives({ALICE}))") == "True"
    for process in (bobs, alices):
        process.kill()
        process.communicate()
    assert bob.python(waiters + f"print(WaiterLocks(home).lives({ALICE}))") == "False"


def test_asking_to_give_way(state, alice, bob):
    ask = PRELUDE + "from gpurun.leases.allocate import *\nAllocator(home).ask_to_give_way({})"
    alice.python(ask.format("['j-00000001', 'j-00000002']"))
    bob.python(ask.format("['j-00000001']"))
    named = {f"j-00000001.{ALICE}", f"j-00000002.{ALICE}", f"j-00000001.{BOB}"}
    assert set(os.listdir(state / "requests")) == named
    alice.python(ask.format("['j-00000002']"))
    assert set(os.listdir(state / "requests")) == named - {f"j-00000001.{ALICE}"}
    due = (
        PRELUDE
        + "from gpurun.leases import allocate as asking\nasking.FIRST_PAUSE_S = asking.LONGEST_PAUSE_S = 600.0\n"
    )
    due += "a = asking.Asked(home, 'j-0000000{}'); print(a.is_due(), a.is_due())"
    assert bob.python(due.format(1)) == "True False"
    assert bob.python(due.format(3)) == "False False"
