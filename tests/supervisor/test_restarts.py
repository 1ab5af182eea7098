from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.record import FirstFailure, JobRecord, Restart, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.supervisor.verdict import ends
from gpurun.supervisor.verdict.ends import End

RECORD = JobRecord("j-00000001", "n", "o", 0, "/i", 4, State.RUNNING, 0.0, 0.0, restarts=1)
HOST_LOST = End(State.FAILED, "gone", 4, suspects=("a",))
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"gpu-r1-[01-02]": {}}}}
"""


@given(st.from_regex(r"j-[0-9a-f]{8}", fullmatch=True), st.integers(1, 10_000))
def test_the_wait_doubles_up_to_its_cap_and_is_always_the_same(job, restart):
    plain = min(3.0 * 2 ** min(restart - 1, 30), 300.0)
    wait = ends.backoff_s(job, restart)
    assert plain * 0.75 <= wait <= plain * 1.25
    assert wait == ends.backoff_s(job, restart)


def test_jobs_that_failed_together_do_not_start_together():
    assert len({round(ends.backoff_s(f"j-{number:08x}", 3), 2) for number in range(50)}) > 40


def test_only_a_hosts_fault_is_tried_again_and_only_so_often():
    assert ends.is_worth_another(RECORD, HOST_LOST, max_restarts=2)
    assert not ends.is_worth_another(RECORD, HOST_LOST, max_restarts=1)
    assert not ends.is_worth_another(RECORD, replace(HOST_LOST, suspects=()), max_restarts=9)
    preempted = replace(HOST_LOST, outcome=State.QUEUED)
    assert not ends.is_worth_another(RECORD, preempted, max_restarts=9), "it is queued anyway, and uncounted"


def test_a_restart_in_words():
    restart = ends.restart_of(RECORD.but(restarts=1), max_restarts=4, now_s=1000.0)
    assert (restart.attempt, restart.of) == (3, 5)
    assert restart.words(restart.at_s - 12.2) == "restarts in 12s (attempt 3 of 5)"
    assert restart.words(restart.at_s - 0.1) == "restarts in 1s (attempt 3 of 5)"
    assert restart.words(restart.at_s) == "waits to be restarted (attempt 3 of 5)"
    assert restart.is_due(-1e9), "the clock was set back"


def setback(kind="container", *, reason="ended (exit code 137)", code=137, step=None, ran_s=20.0, rank=None):
    failure = FirstFailure(reason, rank=rank, host="any", exit_code=code, kind=kind)
    return ends.setback_of(failure, attempt=1, step=step, ran_s=ran_s)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (setback(), setback(), True),
        (None, setback(), False),
        (setback(), setback(code=1), False),
        (setback(), setback(code=None), True),
        (setback(), setback(reason="somebody removed the container"), True),  # which of both is seen is a race
        (setback("launcher", reason="no x"), setback("launcher", reason="no y"), False),
        (setback(), setback(ran_s=3600.0), False),  # it ran for long, so it got somewhere
        (setback(step=10), setback(step=11, ran_s=3600.0), False),
        (setback(step=10), setback(step=10, ran_s=3600.0), True),
        (setback(step=10), setback(step=4), True),
        (setback(), setback(step=4), False),
        (setback("oom", reason="pid 7"), setback("oom", reason="pid 8"), True),
        (setback("host-lost"), setback("host-lost"), False),
        (setback("xid"), setback("xid"), False),
        (setback("", reason="no space"), setback("", reason="no space"), True),
        (setback("", reason="no space"), setback("", reason="no image"), False),
    ],
)
def test_what_counts_as_the_same_failure_again(before, now, same):
    assert ends.repeats(before, now) is same


def test_no_pass_grants_before_the_time_has_come(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    home, inventory = tmp_path / "home", tmp_path / "inventory.yaml"
    store = JobStore(home)
    folder = store.create(JobSpec("n", "i", 4, ("true",)), inventory=inventory, now_s=0.0)
    folder.write(folder.record().but(restart=Restart(100.0, 2, 4), reason="a is gone"))
    record = folder.record()
    assert record.story(95.0) == "restarts in 5s (attempt 2 of 4): a is gone"
    assert Allocator(home).run_pass(now_s=95.0).granted == ()
    assert Allocator(home).run_pass(now_s=95.0, commit=False).decisions[str(inventory)].order == ()
    ((lease, lock),) = Allocator(home).run_pass(now_s=100.0).granted
    lock.close()
    assert (lease.job, folder.record().restart) == (folder.id, None)


def test_hosts_that_failed_the_last_attempt_are_avoided_before_those_that_failed_earlier():
    record = RECORD.but(avoid=("z", "b"))
    assert record.avoiding(["c", "a"]) == ("z", "b", "a", "c")
    assert record.avoiding(["z"]) == ("b", "z")
    assert record.avoiding([]) == ("z", "b")
