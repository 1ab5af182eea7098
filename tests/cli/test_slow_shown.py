"""Who named a rank or a host slow is told: by `status`, `why`, `inventory show` and `doctor`."""

from __future__ import annotations

import json
import time

import pytest

from gpurun.doctor.host_checks import check_named_slow
from gpurun.inventory.read import load_inventory
from gpurun.jobs.events import EventLog
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state.hosts import Machine, Machines

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""
WORDS = "rank 3 on h2 is slow: for 10m00s, its own work took 31 % longer than that of its equals"


@pytest.fixture
def home(tmp_path, monkeypatch, nothing_resumes):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    return tmp_path / "home"


def test_a_running_job_shows_its_slow_rank(home, gpurun):
    store = JobStore(home)
    folder = store.create(JobSpec("n", "i", 4, ("true",)), inventory=home.parent / "inventory.yaml", now_s=time.time())
    folder.write(folder.record().but(state=State.RUNNING, attempt=2))
    EventLog(folder.events, clock=time.time).emit("note", text=WORDS + "\x1b[2J", warning=2, host="h2", slow="h2/3")
    EventLog(folder.events, clock=time.time).emit("note", text="of an older attempt", warning=1)
    for command in ("why", "status"):
        out = gpurun(command, folder.id)[1]
        assert WORDS in out and "\x1b[2J" not in out and "older attempt" not in out
    assert json.loads(gpurun("why", folder.id, "--json")[1])["warnings"] == [WORDS + "\x1b[2J"]


def test_a_host_shows_how_often_it_was_named(home, gpurun):
    host = load_inventory(home.parent / "inventory.yaml").by_name["h2"]
    for _ in range(2):
        Machines(home).note_slow(host.machine, "h2", "", WORDS + "\x1b[2J", now_s=1000.0)
    first, second = json.loads(gpurun("inventory", "show", "@all", "--json")[1])["hosts"]
    assert "slow" not in first
    assert (second["slow"]["times"], second["slow"]["last_s"]) == (2, 1000.0) and WORDS in second["slow"]["why"]
    out = gpurun("inventory", "show", "h2")[1]
    assert "times: 2" in out and WORDS in out and "\x1b[2J" not in out


def test_doctor_remembers_it_for_a_month(home):
    host = load_inventory(home.parent / "inventory.yaml").by_name["h2"]
    known = Machine("h2", 5.0, slow_times=3, slow_s=1e6, slow_why=WORDS)
    (found,) = check_named_slow(host, known, 1e6 + 86400)
    assert (found.check, found.hosts, found.is_fault) == ("named-slow", ("h2",), False)
    assert found.evidence.startswith("jobs named the host slow 3 times, last on ") and WORDS in found.evidence
    assert [*check_named_slow(host, known, 1e6 + 40 * 86400), *check_named_slow(host, Machine("h2", 5.0), 1e6)] == []
    assert list(check_named_slow(host, None, 1e6)) == []
