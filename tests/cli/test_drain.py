"""``gpurun inventory drain``, and what ``status``, ``why`` and ``inventory list`` say of a drain."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from json_shapes import printed_problems

from gpurun.cli import inventory_hosts
from gpurun.cli.main import main
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore, finish
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.state.hosts import Cordon, Cordons
from gpurun.state.sharing import MARK

TEXT = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    (tmp_path / "inventory.yaml").write_text(TEXT)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


@pytest.fixture
def gpurun(home, capfd, monkeypatch):
    del home

    def run(*argv):
        monkeypatch.setattr("sys.argv", ["gpurun", *argv])
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        out, err = capfd.readouterr()
        assert printed_problems(argv, out) == []
        return Said(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def locks():
    """Leases whose supervisors live as long as the test."""
    held = []
    yield held
    for lock in held:
        lock.close()


def runs(home, locks, **wants):
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 4, "command": ("true",), **wants})
    folder = JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=time.time())
    ((lease, lock),) = Allocator(home).run_pass(now_s=time.time()).granted
    locks.append(lock)
    for state in (State.PREPARING, State.STARTING, State.RUNNING):
        folder.move(state, reached="containers", started_s=time.time())
    return folder, lease.grants[0].host


def leaves(home, locks, folder, outcome):
    """What the job's supervisor does once its gang has stopped."""
    folder.move(State.STOPPING, outcome=outcome)
    with AllocatorLock(home).held():
        LeaseStore(home).release(locks.pop() if locks else LeaseStore(home).try_lock(folder.id))
        finish(JobStore(home), folder.record(), now_s=time.time())


def test_drain_says_which_jobs_leave_and_which_are_waited_for(gpurun, home, locks):
    moves, one = runs(home, locks, max_restarts=1)
    stays, other = runs(home, locks)
    said = gpurun("inventory", "drain", f"{one},{other}", "--reason", "fan")
    assert said.code == 0
    assert f"{moves.id} stops, is queued again and continues on other hosts" in said.err
    assert (
        f"{stays.id} must end before the drain is complete: the job is not preemptible, and max_restarts is 0"
        in said.err
    )
    assert moves.cancel_request().kind == "preempt" and stays.cancel_request() is None
    hosts = {row["host"]: row for row in gpurun("status", "--json").json["hosts"]}
    assert (hosts[one]["state"], hosts[one]["drain"]) == ("draining", "draining: 1 gang leaves")
    assert hosts[other]["drain"] == "draining: 1 must end first"
    listed = gpurun("inventory", "list").out
    assert "draining: 1 must end first, by " in listed
    assert "draining: 1 gang leaves, by " in listed
    shown = gpurun("inventory", "show", other, "--json").json["hosts"][0]
    assert (shown["state"], shown["drain"]) == ("draining", "draining: 1 must end first")
    assert "is being drained: the job must end before the drain is complete" in gpurun("why", stays.id).out
    assert "is being drained: the job stops" in gpurun("why", moves.id, "--json").json["message"]


def test_json_names_each_job_with_its_fate(gpurun, home, locks):
    stays, host = runs(home, locks)
    said = gpurun("inventory", "drain", host, "--deadline", "2h", "--json")
    (job,) = said.json["jobs"]
    assert (job["job"], job["fate"], job["hosts"]) == (stays.id, "waits", [host])
    assert 7100 < job["until_s"] - time.time() <= 7200
    assert Cordons(home).read()[host].until_s == job["until_s"]


def test_an_empty_host_is_drained_at_once(gpurun, home):
    said = gpurun("inventory", "drain", "h1", "--wait", "--json")
    assert (said.code, said.json["state"], said.json["jobs"]) == (0, "drained", [])
    assert gpurun("inventory", "list", "h1", "--json").json["hosts"][0]["state"] == "drained"
    assert "drained by " in gpurun("inventory", "list", "h1").out
    assert {row["state"] for row in gpurun("status", "--json").json["hosts"]} == {"ok", "drained"}
    assert "h1" in gpurun("inventory", "list", "@draining").out


def test_a_second_drain_keeps_reason_and_deadline_unless_it_names_others(gpurun, home):
    gpurun("inventory", "drain", "h1", "--deadline", "1h", "--reason", "fan")
    first = Cordons(home).read()["h1"]
    assert gpurun("inventory", "drain", "h1", "--json").json["changed"] == []
    assert Cordons(home).read()["h1"] == first
    gpurun("inventory", "drain", "h1", "--deadline", "5h")
    later = Cordons(home).read()["h1"]
    assert later.reason == "fan" and later.until_s > first.until_s + 3600
    gpurun("inventory", "cordon", "h1", "--reason", "fan")
    assert Cordons(home).read()["h1"].state == "cordoned"
    assert Cordons(home).read()["h1"].until_s is None


def test_a_lost_host_stays_lost(gpurun, home):
    home.mkdir()
    with Cordons(home).changing() as cordons:
        cordons["h1"] = Cordon("lost", "gpurun", 1.0, "")
    assert "h1: lost" in gpurun("inventory", "drain", "h1,h2", "--deadline", "1h").err
    assert Cordons(home).read()["h1"].state == "lost"
    said = gpurun("inventory", "drain", "h1,h2", "--wait")
    assert said.code == 5 and "a host is lost" in said.err


@pytest.mark.parametrize("deadline", ["-5m", "0s", "0", "2", "", "soon", "2h;", "1e99d", "4000d", "\n", "--wait"])
def test_a_deadline_that_is_no_time_is_refused_and_nothing_is_drained(gpurun, home, deadline):
    said = gpurun("inventory", "drain", "h1", f"--deadline={deadline}")
    assert said.code == 2 and "--deadline" in said.err
    assert Cordons(home).read() == {}


@pytest.mark.parametrize("hosts", ["nosuch", "h[1-9]", "", "'; rm", "h1,nosuch"])
def test_hosts_that_the_inventory_does_not_have_are_refused(gpurun, home, hosts):
    assert gpurun("inventory", "drain", hosts).code == 2
    assert Cordons(home).read() == {}


def test_only_root_sets_deadlines_in_a_shared_directory(home, own_copy):
    (home / MARK).mkdir(parents=True)
    own_copy(inventory_hosts, "os", getuid=lambda: 1000)
    with pytest.raises(inventory_hosts.NotYours):
        inventory_hosts.refuse_deadline(home)
    own_copy(inventory_hosts, "os", getuid=lambda: 0)
    inventory_hosts.refuse_deadline(home)


def test_wait_ends_when_the_last_gang_has_left(gpurun, home, locks, own_copy):
    folder, host = runs(home, locks, max_restarts=1)
    looks = []

    def sleep(_):
        looks.append(folder.cancel_request())
        if len(looks) == 2:
            leaves(home, locks, folder, State.QUEUED)

    own_copy(inventory_hosts, "time", sleep=sleep)
    said = gpurun("inventory", "drain", host, "--wait")
    assert said.code == 0 and f"{host}: drained" in said.err
    assert said.err.count(f"{folder.id} stops, is queued again") == 1, "it is said once"
    assert looks[0].kind == "preempt"


def test_wait_has_a_job_picked_up_whose_supervisor_died(gpurun, home, locks, monkeypatch, own_copy):
    folder, host = runs(home, locks)
    locks.pop().close()
    looked = []

    class Caretaker:
        def look(self, folders):
            looked.append([one.id for one in folders])

    monkeypatch.setattr(inventory_hosts, "Caretaker", Caretaker)
    own_copy(inventory_hosts, "time", sleep=lambda _: leaves(home, locks, folder, State.FAILED))
    assert gpurun("inventory", "drain", host, "--wait").code == 0
    assert looked == [[folder.id]]


def test_wait_ends_with_an_error_when_somebody_uncordons_a_host(gpurun, home, locks, own_copy):
    folder, host = runs(home, locks)

    def uncordon(_):
        with Cordons(home).changing() as cordons:
            cordons.clear()

    own_copy(inventory_hosts, "time", sleep=uncordon)
    said = gpurun("inventory", "drain", host, "--wait")
    assert said.code == 5 and "does not drain all named hosts any more" in said.err
    assert folder.cancel_request() is None


def test_uncordon_withdraws_what_the_drain_asked(gpurun, home, locks):
    folder, host = runs(home, locks, max_restarts=1)
    gpurun("inventory", "drain", host)
    assert folder.cancel_request() is not None
    gpurun("inventory", "uncordon", host)
    assert folder.cancel_request() is None


def test_help_says_what_moves_what_is_waited_for_and_how_to_undo_it(gpurun):
    said = gpurun("inventory", "drain", "--help").out
    assert "max_restarts" in said and "--deadline" in said and "uncordon" in said


def test_remove_names_a_way_that_works(gpurun, home, locks):
    """First drain, then wait, then remove."""
    folder, host = runs(home, locks, max_restarts=1)
    said = gpurun("inventory", "remove", host, "--yes")
    assert said.code == 5 and f"gpurun inventory drain {host} --wait" in said.err
    gpurun("inventory", "drain", host)
    leaves(home, locks, folder, State.QUEUED)
    assert gpurun("inventory", "remove", host, "--yes").code == 0
    assert host not in Path(home.parent / "inventory.yaml").read_text() or "h[" in TEXT
