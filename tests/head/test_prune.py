"""Pruning: jobs that have ended go, whole or not at all, and nothing else does."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from gpurun.content.tree import scan
from gpurun.content.workdir import CodeStore
from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.head import prune
from gpurun.head.prune import PruneWish, carry_out, plan_prune
from gpurun.jobs.folder import DOOMED, JobFolder
from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.node.folder import below
from gpurun.state import durable
from gpurun.supervisor.outputs.copy import HeadCopy

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
ALL = PruneWish(ended_before_s=1e12)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    yield JobStore(tmp_path / "home")
    below.remove_path(str(tmp_path / "home"))


def queued(store, **options):
    spec = JobSpec("n", "i", 4, ("true",), outputs="/out", **options)
    return store.create(spec, inventory=store.home.parent / "inventory.yaml", now_s=1.0)


def ended(store, ended_s=100.0, state=State.SUCCEEDED, size=0, **changes):
    folder = queued(store)
    folder.write(folder.record().but(state=state, ended_s=ended_s, **changes))
    store.retire(folder.id)
    folder.log.plain.write_text("said\n")
    folder.outputs.mkdir()
    (folder.outputs / "model").write_bytes(b"x" * size)
    return folder


def pruned(store, wish=ALL):
    done = carry_out(store.home, plan_prune(store.home, wish), wish)
    assert done.failed == {}
    return [each.record.id for each in done.jobs]


def test_only_jobs_that_have_ended_go(store):
    waiting, gone = queued(store), ended(store)
    assert pruned(store) == [gone.id]
    assert store.ids() == store.live_ids() == (waiting.id,)
    assert store.folder.names() == [waiting.id]
    assert pruned(store) == []


@pytest.mark.parametrize("state", [state for state in State if not state.ended])
def test_a_job_that_has_not_ended_stays_and_is_refused_by_name(store, state):
    folder = ended(store)
    folder.write(folder.record().but(state=state))
    assert pruned(store) == []
    with pytest.raises(BadInput, match="has not ended"):
        plan_prune(store.home, PruneWish(jobs=(folder.id,)))
    assert (folder.outputs / "model").exists()


def test_a_running_job_whose_record_lies_stays(store):
    """Its lease is the truth, whichever of its names is left."""
    folder = queued(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=2.0).granted
    folder.write(folder.record().but(state=State.SUCCEEDED, ended_s=3.0))
    plan = plan_prune(store.home, ALL)
    assert (plan.going, list(plan.skipped)) == ((), [folder.id])
    LeaseStore(store.home).path(folder.id).unlink()
    assert "(the fence)" in plan_prune(store.home, ALL).skipped[folder.id]
    LeaseStore(store.home).restore(folder.id)
    (folder.path / "lease.json").unlink()
    assert "(the fence)" in plan_prune(store.home, ALL).skipped[folder.id]
    lock.close()


def test_a_job_of_a_lost_host_stays(store):
    folder = ended(store)
    durable.make_folder(LeaseStore(store.home).folder)
    (LeaseStore(store.home).folder / f"{folder.id}.1.lost.json").touch()
    assert "(the fence)" in plan_prune(store.home, ALL).skipped[folder.id]


@pytest.mark.parametrize("changed", [{"state": State.QUEUED}, {"outputs_left": OutputsLeft(1, ("x",), ("h1",))}])
def test_what_changes_after_the_plan_stays(store, changed):
    folder, other = ended(store), ended(store)
    plan = plan_prune(store.home, ALL)
    folder.write(folder.record().but(**changed))
    done = carry_out(store.home, plan, ALL)
    assert [each.record.id for each in done.jobs] == [other.id]
    assert list(done.failed) == [folder.id]
    assert (folder.outputs / "model").exists()


def test_who_holds_the_allocator_lock_is_waited_for(store):
    """A pass, or whoever adopts a job, has it."""
    folder = ended(store)
    plan = plan_prune(store.home, ALL)
    with AllocatorLock(store.home).held():
        thread = threading.Thread(target=lambda: carry_out(store.home, plan, ALL))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        folder.write(folder.record().but(state=State.QUEUED))
    thread.join()
    assert folder.path.exists()


def test_outputs_that_are_being_brought_stay(store):
    folder = ended(store)
    with HeadCopy(folder).alone():
        done = carry_out(store.home, plan_prune(store.home, ALL), ALL)
    assert "is copying the job's outputs" in done.failed[folder.id].message
    assert (folder.outputs / "model").exists()
    assert pruned(store) == [folder.id]


def test_outputs_that_hosts_alone_have_keep_the_job(store):
    left = OutputsLeft(1, ("h1: did not answer",), ("h1",))
    folder = ended(store, outputs_left=left)
    plan = plan_prune(store.home, ALL)
    assert (plan.going, plan.skipped) == ((), {folder.id: "the job's outputs on h1 have not been copied to the head"})
    with pytest.raises(BadInput, match="outputs on h1"):
        plan_prune(store.home, PruneWish(jobs=(folder.id,)))
    assert pruned(store, PruneWish(jobs=(folder.id,), also_unbrought=True)) == [folder.id]


def test_what_is_lost_nowhere_keeps_no_job(store):
    folder = ended(store, outputs_left=OutputsLeft(1, ("'pipe' is a FIFO",)))
    assert pruned(store) == [folder.id]


def test_by_age_and_by_state(store):
    old, young = ended(store, 100.0, State.FAILED), ended(store, 300.0)
    ended(store, None)
    assert pruned(store, PruneWish(ended_before_s=200.0)) == [old.id]
    assert pruned(store, PruneWish(states=frozenset({State.FAILED}))) == []
    assert pruned(store, PruneWish(ended_before_s=400.0)) == [young.id]


def test_the_oldest_go_until_the_rest_is_below(store):
    jobs = [ended(store, float(at), size=1 << 20) for at in (30, 10, 20)]
    queued(store)
    limit = int(2.5 * (1 << 20))
    plan = plan_prune(store.home, PruneWish(keep_below_bytes=limit))
    assert [each.record.id for each in plan.going] == [jobs[1].id]
    assert plan.kept <= limit
    assert plan_prune(store.home, PruneWish(keep_below_bytes=10 << 20)).going == ()
    all_that_may = plan_prune(store.home, PruneWish(keep_below_bytes=0))
    assert [each.record.id for each in all_that_may.going] == [jobs[1].id, jobs[2].id, jobs[0].id]
    assert all_that_may.kept > 0, "what waits stays, and counts"


def test_the_plan_says_what_the_disk_gets_back(store):
    folder = ended(store, size=3 << 20)
    (each,) = plan_prune(store.home, ALL).going
    assert 3 << 20 <= each.frees < (3 << 20) + (1 << 17)
    (each,) = plan_prune(store.home, PruneWish(jobs=(folder.id,), outputs_only=True)).going
    assert 3 << 20 <= each.frees < (3 << 20) + (1 << 16)


def test_outputs_alone_go_and_the_job_stays(store):
    folder = ended(store, size=10)
    for name in ("outputs.replaced", "outputs.arriving"):
        (folder.path.plain / name).mkdir()
        (folder.path.plain / name / "older").write_text("x")
    before = folder.path.stat().st_mtime_ns
    wish = PruneWish(ended_before_s=1e12, outputs_only=True)
    assert pruned(store, wish) == [folder.id]
    assert not [name for name in folder.path.names() if "outputs" in name]
    assert folder.record().state is State.SUCCEEDED
    assert folder.log.read_text() == "said\n"
    assert folder.path.stat().st_mtime_ns == before, "`gpurun status` shows those that changed last"
    HeadCopy(folder).settle()
    assert not folder.outputs.exists(), "no older copy takes its place"
    assert pruned(store, wish) == []


def test_code_that_other_jobs_use_stays(store):
    one, two = ended(store), ended(store)
    one.code.plain.write_bytes(b"code")
    os.link(one.code.plain, two.code.plain)
    assert pruned(store, PruneWish(jobs=(one.id,))) == [one.id]
    assert two.code.plain.read_bytes() == b"code"


def test_the_plan_counts_code_with_the_last_job_that_has_it(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/large").write_bytes(os.urandom(4 << 20))
    jobs = [ended(store, float(at), size=1) for at in (1, 2, 3)]
    for folder in jobs:
        CodeStore(store.home).add(folder.code, scan(tmp_path / "work"))
    frees = [each.frees for each in plan_prune(store.home, ALL).going]
    assert max(frees[:2]) < 1 << 20 and 4 << 20 <= frees[2] < 5 << 20
    plan = plan_prune(store.home, PruneWish(keep_below_bytes=6 << 20))
    assert plan.going == () and 4 << 20 <= plan.kept < 5 << 20
    assert pruned(store) == [folder.id for folder in jobs]
    store.sweep(now_s=time.time())
    assert store.folder.names() == []


def test_what_a_crash_left_goes_with_the_next_prune(store):
    folder = ended(store)
    (store.folder / f"{DOOMED}j-0000000a-1").mkdir()
    (store.folder.plain / f"{DOOMED}j-0000000a-1/file").write_text("x")
    (folder.path.plain / f"{DOOMED}outputs-1").mkdir()
    assert store.ids() == (folder.id,), "nobody takes it for a job"
    assert pruned(store, PruneWish(ended_before_s=1.0)) == []
    assert store.folder.names() == [folder.id]
    assert f"{DOOMED}outputs-1" not in folder.path.names()


def test_a_crash_after_any_step_leaves_a_job_whole_or_gone(store, monkeypatch):
    class Crash(BaseException):
        pass

    for wish in (ALL, PruneWish(ended_before_s=1e12, outputs_only=True)):
        for count in range(1, 50):
            folder = ended(store, size=10)
            left = [count]

            def point(left=left):
                left[0] -= 1
                if not left[0]:
                    raise Crash

            monkeypatch.setattr(prune.faults, "point", point)
            crashed = False
            try:
                carry_out(store.home, plan_prune(store.home, wish), wish)
            except Crash:
                crashed = True
            monkeypatch.undo()
            for job in store.ids():
                assert store.get(job).record().state is State.SUCCEEDED
                assert store.get(job).spec().outputs == "/out"
            carry_out(store.home, plan_prune(store.home, wish), wish)
            assert not [name for name in store.folder.names() if name.startswith(".")]
            assert not [name for name in folder.path.names() if "outputs" in name] if folder.path.exists() else True
            pruned(store)
            assert store.folder.names() == []
            if not crashed:
                break
        assert count > 3


def test_hostile_outputs_go_and_nothing_outside_does(store, tmp_path):
    far = tmp_path / "far"
    far.mkdir()
    (far / "mine").write_text("stays")
    folder = ended(store)
    (folder.outputs / "folder").symlink_to(far)
    (folder.outputs / "file").symlink_to(far / "mine")
    os.link(far / "mine", folder.outputs / "linked")
    os.mkfifo(folder.outputs / "pipe")
    Path(os.fsdecode(os.fsencode(folder.outputs) + b"/\xff\n")).write_text("x")
    (folder.outputs / "closed/in").mkdir(parents=True)
    (folder.outputs / "closed").chmod(0)
    top = os.open(folder.outputs, os.O_RDONLY)
    for _ in range(500):
        os.mkdir(b"d" * 100, dir_fd=top)
        inner = os.open(b"d" * 100, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = inner
    os.close(top)
    assert pruned(store) == [folder.id]
    assert store.folder.names() == []
    assert (far / "mine").read_text() == "stays"


def test_a_link_in_the_place_of_a_job_or_of_its_outputs_is_no_way_out(store, tmp_path):
    far = tmp_path / "far"
    far.mkdir()
    (far / "mine").write_text("stays")
    (store.home / "jobs").mkdir(parents=True)
    (store.home / "jobs/j-0000000a").symlink_to(far)
    folder = ended(store)
    below.remove_path(str(folder.outputs))
    folder.outputs.symlink_to(far)
    plan = plan_prune(store.home, ALL)
    assert list(plan.skipped) == ["j-0000000a"]
    carry_out(store.home, plan, ALL)
    assert (far / "mine").read_text() == "stays"
    assert store.ids() == ("j-0000000a",)


def test_a_job_that_is_swapped_for_a_link_after_the_plan_stays(store, tmp_path):
    far = tmp_path / "far"
    folder, other = ended(store), ended(store)
    plan = plan_prune(store.home, PruneWish(jobs=(folder.id,)))
    folder.path.plain.rename(far)
    folder.path.plain.symlink_to(other.path.plain)
    done = carry_out(store.home, plan, ALL)
    assert list(done.failed) == [folder.id]
    assert (far / "state.json").exists()
    assert (other.outputs / "model").exists()


def test_a_mount_keeps_its_job(store, monkeypatch):
    folder = ended(store)
    monkeypatch.setattr(prune, "mounts_below", lambda path, _: (f"{path}/outputs",))
    assert "mount point" in plan_prune(store.home, ALL).skipped[folder.id]


def test_a_damaged_record_keeps_its_job(store):
    folder = ended(store)
    (folder.path.plain / "state.json").write_text("{")
    assert "damaged" in plan_prune(store.home, ALL).skipped[folder.id]
    with pytest.raises(StateError):
        plan_prune(store.home, PruneWish(jobs=(folder.id,)))


def test_a_record_that_cannot_be_read_now_is_not_called_damaged(store, monkeypatch):
    folder = ended(store)

    def short(_):
        raise StateUnavailable("this process has too many open files")

    monkeypatch.setattr(JobFolder, "record", short)
    why = plan_prune(store.home, ALL).skipped[folder.id]
    assert "cannot be read now" in why and "too many open files" in why and "damaged" not in why


def test_a_full_disk_is_when_it_must_work(store, monkeypatch):
    folder = ended(store, size=10)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = plan_prune(store.home, ALL)
    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "pwrite", full)
    done = carry_out(store.home, plan, ALL)
    monkeypatch.undo()
    assert done.failed == {}
    assert not folder.path.exists()


def test_what_cannot_be_removed_is_named_and_the_rest_goes(store, monkeypatch):
    stays, goes = ended(store, 1.0), ended(store, 2.0)
    remove = below.remove_entry

    def refused(above, name):
        if stays.id.encode() in name:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        remove(above, name)

    monkeypatch.setattr(below, "remove_entry", refused)
    done = carry_out(store.home, plan_prune(store.home, ALL), ALL)
    assert [each.record.id for each in done.jobs] == [goes.id]
    assert stays.id in done.failed
    monkeypatch.undo()
    pruned(store)
    assert store.folder.names() == []


def test_prunes_at_the_same_moment_do_not_trip_over_each_other(store):
    for _ in range(20):
        ended(store, size=10)
    failed = []

    def one():
        plan = plan_prune(store.home, ALL)
        failed.append(carry_out(store.home, plan, ALL).failed)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [{}] * 4
    assert store.folder.names() == []
