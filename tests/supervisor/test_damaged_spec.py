"""A job whose spec is damaged after its grant gives its GPUs back; a gang that runs trains on until it is cancelled."""

from __future__ import annotations

import pytest

from gpurun.errors import StateError
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.life import live

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


@pytest.fixture
def granted(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    store = JobStore(tmp_path / "home")
    folder = store.create(JobSpec("n", "i", 4, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=1.0)
    ((lease, lock),) = Allocator(tmp_path / "home").run_pass(now_s=2.0).granted
    return tmp_path / "home", folder, lease, lock


@pytest.mark.parametrize("damage", [None, b"", b"{}", b"\x00\xff", b'{"name": 1}'])
def test_before_it_runs_it_ends_and_its_gpus_are_free(granted, damage):
    home, folder, lease, lock = granted
    path = (folder.path / "spec.json").plain
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    assert live(SupervisedJob(home, lease, lock)) is State.FAILED
    assert "spec.json" in folder.record().reason
    assert folder.record().code == StateError.exit_code
    assert LeaseStore(home).read_all().leases == ()


def test_while_it_runs_it_trains_on_until_somebody_cancels_it(granted):
    home, folder, lease, lock = granted
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state)
    (folder.path / "spec.json").plain.write_bytes(b"?")
    with pytest.raises(StateError, match=r"spec\.json") as raised:
        live(SupervisedJob(home, lease, lock))
    assert f"gpurun cancel {folder.id}" in (raised.value.hint or "")
    assert folder.record().state is State.RUNNING
    assert LeaseStore(home).read(folder.id) == lease
    folder.ask_to_cancel(CancelRequest("cancel", by="alice", asked_s=3.0))
    assert live(SupervisedJob(home, lease, lock)) is State.CANCELLED
    assert LeaseStore(home).read_all().leases == ()
