"""The keeper of a lost lease: who is asked, and who is left alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from gpurun.errors import HostFailure
from gpurun.jobs.record import OutputsLeft
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.remote.fleet import Results
from gpurun.supervisor import stop

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"gpu-r1-[01-03]": {}}}}
"""


class FakeLinks:
    def __init__(self, _inventory, hosts):
        self.targets = dict.fromkeys(hosts)

    def open(self, hosts, *, timeout_s):
        return {}

    def close(self):
        pass


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A lost lease of two hosts, and a function that makes the lease of the job's next attempt."""
    monkeypatch.setattr(stop, "Links", FakeLinks)
    monkeypatch.setattr(stop, "LOST_RETRY_FIRST_S", 0.01)
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    folder = JobStore(tmp_path).create(JobSpec("n", "i", 8, ("true",)), inventory=path, now_s=0.0)

    def lease(*hosts, attempt=1, is_lost=False):
        grants = tuple(Grant(host, (0,)) for host in hosts)
        made = Lease(folder.id, attempt, "o", 0, "pascal", ("r1",), grants, 23022, 0.0, str(path), lost=is_lost)
        return made, LeaseStore(tmp_path).grant(made, Occupancy())

    return tmp_path, lease


class AskedLinks(FakeLinks):
    """Every host gives its proof; what each was asked is noted."""

    asked: ClassVar[list[tuple[str, dict[str, object]]]] = []

    def each(self, call, hosts):
        def ask(op, **arguments):
            self.asked.append((op, arguments))
            return SimpleNamespace(value={"containers": [], "users": [], "claims": []})

        return Results(ok={host: call(SimpleNamespace(host=host, call=ask)) for host in hosts}, failed={})


def test_a_host_where_the_job_runs_again_is_asked_for_the_lost_attempt_only(lost, monkeypatch):
    """A person may uncordon it while one of its GPUs is still lost; the host leaves the later attempt alone."""
    home, lease = lost
    kept, lock = lease("gpu-r1-01", "gpu-r1-02", is_lost=True)
    monkeypatch.setattr(stop, "Links", AskedLinks)
    monkeypatch.setattr(AskedLinks, "asked", [])
    now, _ = lease("gpu-r1-02", attempt=2)
    stop.keep_asking(home, kept, lock)
    fences = [arguments for op, arguments in AskedLinks.asked if op == "gang.fence"]
    assert [(each["job"], each["attempt"], each["claimant"]["attempt"]) for each in fences] == [(kept.job, 1, 1)] * 2
    assert [each.attempt for each in LeaseStore(home).read_all().leases] == [2]
    told = [json.loads(line) for line in JobStore(home).get(now.job).events.read_text().splitlines()]
    assert [(event["host"], event["state"]) for event in told] == [("gpu-r1-01", "fenced"), ("gpu-r1-02", "fenced")]


@pytest.mark.parametrize(
    ("state", "attempt", "left_on", "removes"),
    [
        (State.SUCCEEDED, 1, "gpu-r1-01", False),
        (State.QUEUED, 1, "gpu-r1-01", False),
        (State.CANCELLED, 1, "gpu-r1-02", True),
        (State.CANCELLED, 1, None, True),  # the head has everything: it had left an elastic gang before
        (State.QUEUED, 2, "gpu-r1-01", True),
        (State.RUNNING, 2, "gpu-r1-01", True),
        (State.RUNNING, 1, "gpu-r1-01", True),  # an elastic gang
    ],
)
def test_outputs_on_a_lost_host_are_removed_only_once_the_job_has_gone_on_without_them(
    lost, monkeypatch, state, attempt, left_on, removes
):
    """Else nobody has what the last attempt wrote there."""
    home, lease = lost
    kept, lock = lease("gpu-r1-01", is_lost=True)
    folder = JobStore(home).get(kept.job)
    left = OutputsLeft(1, ("it did not answer",), (left_on,)) if left_on else None
    folder.write(folder.record().but(state=state, attempt=attempt, outputs_left=left))
    asked = {}
    monkeypatch.setattr(stop, "fence", lambda _, __, hosts, *, outputs, **___: asked.update({outputs: hosts}) or {})
    stop.keep_asking(home, kept, lock)
    assert [outputs for outputs, hosts in asked.items() if hosts] == [removes]


def test_it_asks_until_the_proof_is_there(lost, monkeypatch):
    home, lease = lost
    kept, lock = lease("gpu-r1-01", is_lost=True)
    answers = [{"gpu-r1-01": HostFailure("GPU 0 is held by pid 7")}, {"gpu-r1-01": HostFailure("…")}, {}]
    monkeypatch.setattr(stop, "fence", lambda *_, **__: answers.pop(0))
    stop.keep_asking(home, kept, lock)
    assert answers == []
    assert LeaseStore(home).read_all().leases == ()
