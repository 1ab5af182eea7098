"""GPUs that are kept for a queued job over passes: what is stored, what is handed back, and what old files say."""

import json

import pytest

from gpurun.jobs.record import JobRecord, Kept, State
from gpurun.jobs.spec import Grant, JobSpec, Placement
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.scheduler.model import DEFAULT

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  r1: {hosts: {"h[1-2]": {}}}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def submit(home, gpus, now_s, priority=0, name="n"):
    spec = JobSpec(name=name, image="i", gpus=gpus, command=("true",), priority=priority)
    return JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=now_s)


def granted(home, now_s):
    """The jobs that a pass starts."""
    leases = Allocator(home).run_pass(now_s=now_s).granted
    for _, lock in leases:
        lock.close()
    return [lease.job for lease, _ in leases]


def end(home, job):
    """The job ends, and its hosts are fenced."""
    folder = JobStore(home).get(job)
    for state in (State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING, State.SUCCEEDED):
        folder.move(state)
    leases = LeaseStore(home)
    with AllocatorLock(home).held():
        leases.release(leases.try_lock(job))


def test_hosts_kept_for_a_large_gang_stay_kept_while_more_important_ones_arrive(home):
    one, other = submit(home, 4, 1.0).id, submit(home, 4, 1.0).id
    assert sorted(granted(home, 1.0)) == sorted([one, other])
    large = submit(home, 8, 2.0, name="large'; touch x #")
    late_s = 2.0 + DEFAULT.patience_s
    assert granted(home, late_s) == []
    assert large.record().kept.why == "patience"
    end(home, one)
    stream = [submit(home, 4, late_s, priority=9).id for _ in range(3)]
    assert granted(home, late_s + 1) == [], "one of the stream took the first host that was kept"
    end(home, other)
    assert granted(home, late_s + 2) == [large.id]
    assert large.record().kept is None
    end(home, large.id)
    assert len(granted(home, late_s + 3)) == 2 and stream


def test_what_is_kept_survives_in_the_record(home):
    folder = submit(home, 8, 2.0)
    kept = Kept(Placement("pascal", ("r1",), (Grant("h1", (0, 1, 2, 3)), Grant("h'; rm -rf", (0,)))), "preemption")
    folder.write(folder.record().but(kept=kept))
    assert folder.record().kept == kept


def test_a_state_file_of_an_older_gpurun_decodes_and_its_job_runs(home):
    """It has the GPUs under another name and without a kind: they are forgotten, and the next pass decides again."""
    folder = submit(home, 8, 2.0)
    state = json.loads((folder.path / "state.json").read_text())
    del state["kept"]
    state["claim"] = {"generation": "pascal", "racks": ["r1"], "grants": [{"host": "h1", "gpus": [0, 1]}]}
    (folder.path / "state.json").plain.write_text(json.dumps(state))
    assert isinstance(folder.record(), JobRecord)
    assert granted(home, 3.0) == [folder.id]
