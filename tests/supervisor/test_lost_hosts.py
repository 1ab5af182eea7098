"""The keeper of a lost lease: who is asked, and who is left alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from gpurun.errors import HostFailure, StateDiskError
from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.remote.fleet import Results
from gpurun.state import durable
from gpurun.supervisor import stop
from gpurun.supervisor import stop as lost_hosts

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"gpu-r1-[01-03]": {}}}}
"""


class FakeLinks:
    epilogs: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, _inventory, hosts):
        self.targets = dict.fromkeys(hosts)

    def open(self, hosts, *, timeout_s):
        return {}

    def is_open(self, host):
        return True

    def close(self):
        pass


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A lost lease of two hosts, and a function that makes the lease of the job's next attempt."""
    monkeypatch.setattr(lost_hosts, "Links", FakeLinks)
    monkeypatch.setattr(lost_hosts, "LOST_RETRY_FIRST_S", 0.01)
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
    monkeypatch.setattr(lost_hosts, "Links", AskedLinks)
    monkeypatch.setattr(AskedLinks, "asked", [])
    now, _ = lease("gpu-r1-02", attempt=2)
    lost_hosts.keep_asking(home, kept, lock)
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
    monkeypatch.setattr(
        lost_hosts, "fence", lambda _, __, hosts, *, outputs, **___: asked.update({outputs: hosts}) or {}
    )
    lost_hosts.keep_asking(home, kept, lock)
    assert [outputs for outputs, hosts in asked.items() if hosts] == [removes]


def test_it_asks_until_the_proof_is_there(lost, monkeypatch):
    home, lease = lost
    kept, lock = lease("gpu-r1-01", is_lost=True)
    answers = [{"gpu-r1-01": HostFailure("GPU 0 is held by pid 7")}, {"gpu-r1-01": HostFailure("…")}, {}]
    monkeypatch.setattr(lost_hosts, "fence", lambda *_, **__: answers.pop(0))
    lost_hosts.keep_asking(home, kept, lock)
    assert answers == []
    assert LeaseStore(home).read_all().leases == ()


class NotedLog:
    """Stands for the copy of a log; notes what it was asked, and writes a line for each host."""

    def __init__(self, _links, first, *, job, attempt, container, path, clock, reports, limit):
        self.first, self.path = first, path
        STEPS.append(f"begin {container}")

    def start(self):
        pass

    def follow(self, hosts):
        STEPS.append(f"follow {' '.join(hosts)}")

    def take_rest(self, hosts, _):
        self.path.plain.write_text("last words\n")
        STEPS.append(f"take {' '.join(hosts)}")

    def wait_for_launcher(self, _):
        STEPS.append("launcher")

    def close(self):
        STEPS.append("close")


STEPS: list[str] = []


@pytest.fixture
def late(lost, monkeypatch):
    """A job whose two hosts were lost: how it stands, and what its keeper did."""
    home, lease = lost
    STEPS.clear()
    kept, lock = lease("gpu-r1-01", "gpu-r1-02", is_lost=True)
    folder = JobStore(home).get(kept.job)
    folder.write(folder.record().but(state=State.FAILED, attempt=1, reached="containers", granted=kept.grants))
    monkeypatch.setattr(lost_hosts, "Links", AskedLinks)
    monkeypatch.setattr(AskedLinks, "asked", [])
    monkeypatch.setattr(stop, "LogCopy", NotedLog)
    monkeypatch.setattr(
        lost_hosts, "fence", lambda _, __, hosts, **___: STEPS.append(f"fence {' '.join(sorted(hosts))}") or {}
    )

    def keep(**changes):
        folder.write(folder.record().but(**changes))
        lost_hosts.keep_asking(home, kept, lock)
        return list(STEPS)

    return SimpleNamespace(keep=keep, folder=folder, kept=kept)


def test_the_last_lines_of_a_host_that_comes_back_are_in_the_log_before_it_is_fenced(late, monkeypatch):
    monkeypatch.setattr(AskedLinks, "is_open", lambda _, host: host == "gpu-r1-01")
    monkeypatch.setattr(durable, "sync_file", lambda path: STEPS.append(f"sync {path.name}"))
    took = ["follow gpu-r1-01", "take gpu-r1-01", "launcher", "close", "sync log", "fence gpu-r1-01 gpu-r1-02"]
    assert late.keep() == [f"begin gpurun-{late.kept.job}-1", *took]
    killed = [arguments["path"] for op, arguments in AskedLinks.asked if op == "docker.request"]
    assert killed == [f"/containers/gpurun-{late.kept.job}-1/kill"]


@pytest.mark.parametrize(
    "changes", [{"state": State.QUEUED}, {"state": State.RUNNING, "attempt": 2}, {"attempt": 2}, {"reached": "files"}]
)
def test_the_log_of_a_job_that_runs_again_or_ran_nothing_is_left_to_its_supervisor(late, changes):
    assert late.keep(**changes) == ["fence gpu-r1-01 gpu-r1-02"]


def test_a_host_whose_last_lines_break_its_connection_is_connected_again_for_its_fence(late, monkeypatch):
    """One that floods the copy of its ranks' output was asked for its lines first, at each try, for ever."""
    up = {"gpu-r1-01"}
    monkeypatch.setattr(AskedLinks, "is_open", lambda _, host: host in up)
    monkeypatch.setattr(AskedLinks, "open", lambda _, hosts, *, timeout_s: STEPS.append(f"open {' '.join(hosts)}"))
    monkeypatch.setattr(NotedLog, "take_rest", lambda _, hosts, __: up.clear())
    late.folder.log.plain.write_text("")
    steps = late.keep()
    assert [step for step in steps if step.startswith(("open", "fence"))] == [
        "open gpu-r1-01 gpu-r1-02", "open gpu-r1-01", "fence gpu-r1-01 gpu-r1-02",
    ]  # fmt: skip


def test_a_host_is_not_fenced_while_its_last_lines_cannot_be_kept(late, monkeypatch):
    def failing(_):
        raise StateDiskError("cannot be synced: the disk failed")

    monkeypatch.setattr(durable, "sync_file", failing)
    with pytest.raises(StateDiskError):
        late.keep()
    assert not any(step.startswith("fence") for step in STEPS)
