"""What a supervisor makes of requests to its job."""

from __future__ import annotations

import json

import pytest

from gpurun.jobs.record import CancelRequest
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.verdict.ends import GangEnd

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    JobStore(tmp_path).create(JobSpec("n", "i", 4, ("true",)), inventory=tmp_path / "inventory.yaml", now_s=0.0)
    ((lease, lock),) = Allocator(tmp_path).run_pass(now_s=1.0).granted
    yield SupervisedJob(tmp_path, lease, lock)
    lock.close()


def test_a_damaged_request_ends_no_gang_and_is_told_of(job):
    (job.folder.path / "cancel.json").plain.write_bytes(b'{"kind": "cancel", "by"')
    job.check_requests(ladder=True)
    job.check_requests(ladder=True)
    (told,) = [json.loads(line) for line in job.folder.events.read_text().splitlines()]
    assert "cancel.json.damaged-" in told["text"]


def test_a_cancel_after_it_does(job):
    (job.folder.path / "cancel.json").plain.write_bytes(b"\0")
    job.folder.ask_to_cancel(CancelRequest("cancel", "me", 2.0))
    with pytest.raises(GangEnd, match="cancelled by me"):
        job.check_requests(ladder=True)
