"""Looks at hosts: what is noted, what a supervisor is told, and rounds of looks."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from gpurun.doctor.survey import Survey
from gpurun.errors import AuthenticationFailed, HeadShort, HostUnreachable, StateDiskError
from gpurun.facts import DockerFacts, Gpu, Hardware
from gpurun.head import looking, looks
from gpurun.head.looking import AT_ONCE, look_at, look_round
from gpurun.inventory.read import load_inventory
from gpurun.state.hosts import Machine, Machines, Out

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[01-40]": {}}}}
"""
UID = os.getuid()
ID = "a" * 32


class Fleet:
    """A stand-in for agents on hosts.

    Attributes:
        broken: host → why it cannot be reached.
        gpu: what each host says of its GPU.
        refusing: hosts that refuse the user's keys.
        asked: the hosts of each look.
    """

    def __init__(self):
        self.broken, self.asked, self.ids, self.refusing, self.offsets = {}, [], {}, set(), {}
        self.gpu = Gpu(0, generation="pascal")

    def open(self, targets, *, limit, timeout_s):
        assert limit == AT_ONCE
        self.asked.append([target.name for target in targets])
        return self

    def close(self):
        pass

    def probe(self, _fleet, _inventory, hosts):
        failed = {host: HostUnreachable(self.broken[host], host=host) for host in hosts if host in self.broken}
        failed |= {
            host: AuthenticationFailed("it refuses every key", host=host) for host in hosts if host in self.refusing
        }
        engine = DockerFacts(version="26.1", gpu_support="cdi", memory_bytes=64 << 30, cores=16)
        sound = Hardware("h", gpus=(self.gpu,), docker=engine)
        ok = {
            host: Hardware(
                host,
                machine_id=self.ids.get(host, ID),
                clock_offset_s=self.offsets.get(host, 0.0),
                gpus=sound.gpus,
                docker=sound.docker,
                driver="535.1",
            )
            for host in hosts
            if host not in failed
        }
        return Survey(ok, failed)


@pytest.fixture
def fleet(monkeypatch):
    made = Fleet()
    monkeypatch.setattr(looking, "Fleet", made)
    monkeypatch.setattr(looking, "probe", made.probe)
    return made


@pytest.fixture
def inventory(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return load_inventory(tmp_path / "inventory.yaml")


def known(home):
    return {machine.name: machine for machine in Machines(home).read(UID).values()}


def test_a_look_says_and_notes_which_hosts_are_out(tmp_path, inventory, fleet):
    fleet.broken = {"h02": "no route to host"}
    begun_s = time.time()
    found = look_at(tmp_path, inventory, ["h01", "h02", "h02", "stranger"])
    assert found["h01"] is None
    assert (found["h02"].check, found["h02"].reason) == ("ssh", "no route to host")
    assert set(found) == {"h01", "h02"}
    noted = known(tmp_path)
    assert noted["h01"].out is None and noted["h01"].id == ID and noted["h01"].inventory == inventory.source
    assert noted["h02"].out == found["h02"] and noted["h02"].id == ""
    assert begun_s <= noted["h01"].seen_s <= time.time()


def test_what_a_host_has_for_jobs_is_known_from_then_on(tmp_path, inventory, fleet):
    look_at(tmp_path, inventory, ["h01"])
    assert (known(tmp_path)["h01"].memory_mib, known(tmp_path)["h01"].cores) == (64 * 1024, 16)
    fleet.broken = {"h01": "no route to host"}
    look_at(tmp_path, inventory, ["h01"])
    assert known(tmp_path)["h01"].memory_mib == 64 * 1024


@pytest.fixture
def looks_later(tmp_path, monkeypatch):
    """Look at h01 as if some seconds had passed since the last look."""
    monkeypatch.setattr(looking, "FRESH_S", -1.0)
    begun_s = [time.time() - 1000.0]

    def look(inventory, after_s=10.0):
        begun_s[0] += after_s
        with monkeypatch.context() as patched:
            patched.setattr(looking.time, "time", lambda: begun_s[0])
            return look_at(tmp_path, inventory, ["h01"])["h01"]

    return look


def with_burn_in(tmp_path, number):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY.replace("gpus: 1,", f"gpus: 1, burn_in: {number},"))
    return load_inventory(path)


def test_a_host_comes_back_by_the_same_look_if_it_passes_twice(tmp_path, inventory, fleet, looks_later):
    fleet.broken = {"h01": "no route to host"}
    first = looks_later(inventory)
    fleet.broken = {}
    out = looks_later(inventory)
    assert out.words == "out: no route to host (passed 1 of 2 checks)" and out.since_s == first.since_s
    assert known(tmp_path)["h01"].out == out
    assert looks_later(inventory, 1.0) == out, "two looks at a moment are one check"
    assert looks_later(inventory) is None and known(tmp_path)["h01"].out is None
    assert looks_later(inventory) is None


def test_a_host_that_fails_within_its_burn_in_begins_anew_with_the_new_reason(tmp_path, fleet, looks_later):
    inventory = with_burn_in(tmp_path, 3)
    fleet.broken = {"h01": "no route to host"}
    looks_later(inventory)
    fleet.broken = {}
    assert [looks_later(inventory).passed for _ in range(2)] == [1, 2]
    fleet.broken = {"h01": "connection refused"}
    out = looks_later(inventory)
    assert (out.reason, out.passed) == ("connection refused", 0)
    fleet.broken = {}
    assert [looks_later(inventory).passed for _ in range(2)] == [1, 2] and looks_later(inventory) is None


def test_a_burn_in_of_one_check_is_none(tmp_path, fleet, looks_later):
    inventory = with_burn_in(tmp_path, 1)
    fleet.gpu = Gpu(0, problem="GPU is lost")
    assert looks_later(inventory).check == "gpu-lost"
    fleet.gpu = Gpu(0, generation="pascal", pcie_width=8, pcie_max_width=16)
    assert looks_later(inventory) is None


def test_a_host_whose_gpu_was_lost_returns_only_with_sound_gpus(inventory, fleet, looks_later):
    """Somebody reseats the GPU, and half of its lanes have no contact."""
    fleet.gpu = Gpu(0, problem="GPU is lost")
    assert looks_later(inventory).check == "gpu-lost"
    fleet.gpu = Gpu(0, generation="pascal", pcie_width=8, pcie_max_width=16)
    outs = [looks_later(inventory) for _ in range(4)]
    assert {(out.check, out.passed) for out in outs} == {("gpu-pcie", 0)} and "8 of 16 lanes" in outs[0].reason
    fleet.gpu = Gpu(0, generation="pascal", pcie_width=16, pcie_max_width=16)
    assert looks_later(inventory).passed == 1 and looks_later(inventory) is None
    fleet.gpu = Gpu(0, generation="pascal", pcie_width=8, pcie_max_width=16)
    assert looks_later(inventory) is None, "a host in use may have few lanes: doctor warns"


def test_a_host_that_was_cut_off_returns_with_the_gpus_that_it_had(inventory, fleet, looks_later):
    fleet.gpu = Gpu(0, generation="pascal", pcie_width=8, pcie_max_width=16)
    fleet.broken = {"h01": "no route to host"}
    looks_later(inventory)
    fleet.broken = {}
    assert looks_later(inventory).passed == 1 and looks_later(inventory) is None


def test_a_look_holds_from_its_own_beginning(tmp_path, inventory, fleet, monkeypatch):
    """While it waited, somebody else looked at the mended host."""
    fleet.broken, real = {"h01": "no route to host"}, fleet.probe

    def slow(*arguments):
        Machines(tmp_path).note({"h01:22": Machine("h01", time.time(), begun_s=time.time())})
        return real(*arguments)

    monkeypatch.setattr(looking, "probe", slow)
    assert look_at(tmp_path, inventory, ["h01"])["h01"] is not None
    assert known(tmp_path)["h01"].out is None


def test_many_supervisors_that_fail_on_one_host_make_one_look(tmp_path, inventory, fleet):
    fleet.broken = {"h01": "no route to host"}
    first = look_at(tmp_path, inventory, ["h01"])
    assert [look_at(tmp_path, inventory, ["h01"])["h01"].reason for _ in range(5)] == [first["h01"].reason] * 5
    assert len(fleet.asked) == 1
    for _ in range(2):
        look_at(tmp_path, inventory, ["h02"])
    assert len(fleet.asked) == 3, "that a host is sound must be so at this moment"


def test_a_host_whose_answer_gpurun_cannot_take_is_out_alone(tmp_path, inventory, fleet, monkeypatch):
    """It ended the round, and no host came back."""

    def probe(with_fleet, with_inventory, hosts):
        if hosts == ["h02"]:
            raise IndexError("list index out of range")
        return fleet.probe(with_fleet, with_inventory, hosts)

    monkeypatch.setattr(looking, "probe", probe)
    look_round(tmp_path, [inventory.source])
    outs = {name: machine.out.reason for name, machine in known(tmp_path).items() if machine.out is not None}
    assert outs == {"h02": "gpurun failed to read the host's answer: IndexError: list index out of range"}
    assert len(known(tmp_path)) == 40


def test_a_head_without_descriptors_takes_no_host_out(tmp_path, inventory, fleet, monkeypatch):
    short = HeadShort("this machine cannot connect to the host now: too many open files", host="h02")
    seen = Survey({}, {"h01": HostUnreachable("no route to host", host="h01"), "h02": short})
    monkeypatch.setattr(fleet, "probe", lambda *_: seen)
    found = looking.note_survey(tmp_path, inventory, inventory.hosts[:2], seen, time.time())
    assert set(found) == set(known(tmp_path)) == {"h01"}


def test_at_most_16_hosts_are_looked_at_at_once(tmp_path, inventory, fleet):
    look_at(tmp_path, inventory, [host.name for host in inventory.hosts])
    assert [len(some) for some in fleet.asked] == [16, 16, 8]


def test_a_full_disk_of_the_head_changes_no_answer(tmp_path, inventory, fleet, monkeypatch):
    def full(*_):
        raise StateDiskError("the disk is full")

    monkeypatch.setattr(looking.Machines, "note", full)
    fleet.broken = {"h01": "no route to host"}
    assert look_at(tmp_path, inventory, ["h01"])["h01"].reason == "no route to host"


@pytest.mark.parametrize("said", ["A" * 32, "a" * 33, "a" * 10**6, "../../etc", "", "a" * 31 + "\n"])
def test_what_a_hostile_host_calls_itself_is_not_kept(tmp_path, inventory, fleet, said):
    fleet.ids = {"h01": said}
    look_at(tmp_path, inventory, ["h01"])
    assert known(tmp_path)["h01"].id == ""


def test_a_round_looks_at_hosts_that_are_due_those_that_are_out_first(tmp_path, inventory, fleet):
    now_s = time.time()
    Machines(tmp_path).note({f"h{n:02}:22": Machine(f"h{n:02}", now_s) for n in range(1, 38) if n != 9})
    Machines(tmp_path).note({"h09:22": Machine("h09", now_s - 60, out=Out("ssh", "no", now_s - 60))})
    look_round(tmp_path, [inventory.source, "/nowhere.yaml"])
    assert fleet.asked == [["h09", "h38", "h39", "h40"]]
    look_round(tmp_path, [inventory.source])
    assert len(fleet.asked) == 1, "now all are known"


def test_dead_hosts_keep_no_other_host_from_its_look(tmp_path, inventory, fleet, monkeypatch):
    """A look at a dead host takes its whole time-out, and then it is due again."""
    clock = [1000.0]
    now_s = time.time()
    dead = {f"h{n:02}" for n in range(1, 25)}
    fleet.broken = dict.fromkeys(dead, "no answer within 15 s")
    Machines(tmp_path).note({f"{host}:22": Machine(host, now_s - 60, out=Out("ssh", "x", now_s - 60)) for host in dead})
    real = fleet.open

    def opened(*arguments, **options):
        clock[0] += 15
        monkeypatch.setattr(time, "time", lambda: now_s + clock[0] - 1000)
        return real(*arguments, **options)

    monkeypatch.setattr(fleet, "open", opened)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    look_round(tmp_path, [inventory.source])
    seen = [host for some in fleet.asked for host in some]
    assert all(len(some) <= AT_ONCE for some in fleet.asked)
    assert {host.name for host in inventory.hosts} == set(seen)
    first_live = next(n for n, some in enumerate(fleet.asked) if set(some) - dead)
    assert first_live == 0, "half of the first batch"
    assert all(seen.count(host) >= 2 for host in dead), "a long round looks at them again"
    assert all(seen.count(host.name) == 1 for host in inventory.hosts if host.name not in dead)


def comes(condition):
    return any(condition() or time.sleep(0.01) for _ in range(2000))


def test_a_host_that_hangs_holds_up_no_other_host(tmp_path, inventory, fleet, monkeypatch):
    """Its driver, or the site's own check, takes a minute: meanwhile all others are noted."""
    others, seen, real = {host.name for host in inventory.hosts} - {"h01"}, [], fleet.probe

    def probe(with_fleet, with_inventory, hosts):
        if "h01" in hosts:
            seen.append(comes(lambda: set(known(tmp_path)) == others))
        return real(with_fleet, with_inventory, hosts)

    monkeypatch.setattr(looking, "PATIENCE_S", 0.05)
    monkeypatch.setattr(looking, "probe", probe)
    look_round(tmp_path, [inventory.source])
    assert seen == [True]
    assert set(known(tmp_path)) == {*others, "h01"}, "its own answer counts when it comes"


@pytest.mark.parametrize("by_timer", [False, True])
def test_a_host_that_is_out_is_looked_at_again_while_another_one_hangs(
    tmp_path, inventory, fleet, monkeypatch, by_timer
):
    seen, real, fleet.broken = [], fleet.probe, {"h02": "no route to host"}

    def probe(with_fleet, with_inventory, hosts):
        if "h01" in hosts:
            seen.append(comes(lambda: sum("h02" in some for some in fleet.asked) >= 2))
            fleet.broken = {}
        return real(with_fleet, with_inventory, hosts)

    for module, name, value in ((looking, "PATIENCE_S", 0.05), (looking, "AGAIN_S", 0.0), (looks, "AGAIN_S", 0.0)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(looking, "TICK_S", 0.05)
    monkeypatch.setattr(looking, "probe", probe)
    look_round(tmp_path, [inventory.source], by_timer=by_timer)
    assert seen == [True]
    assert known(tmp_path)["h02"].out is None and known(tmp_path)["h01"].out is None


def test_a_round_gives_up_what_hangs_when_its_time_is_over(tmp_path, inventory, fleet, monkeypatch):
    released, real = threading.Event(), fleet.probe

    def probe(with_fleet, with_inventory, hosts):
        if "h01" in hosts:
            released.wait(20)
        return real(with_fleet, with_inventory, hosts)

    for name, value in (("PATIENCE_S", 0.05), ("TICK_S", 0.05), ("BEGIN_WITHIN_S", 0.5)):
        monkeypatch.setattr(looking, name, value)
    monkeypatch.setattr(looking, "probe", probe)
    look_round(tmp_path, [inventory.source])
    assert not released.is_set() and "h01" not in known(tmp_path)
    released.set()


def test_a_round_ends_where_nothing_can_be_noted(tmp_path, inventory, fleet, monkeypatch):
    def full(*_):
        raise StateDiskError("the disk is full")

    monkeypatch.setattr(looking.Machines, "note", full)
    look_round(tmp_path, [inventory.source])
    assert [len(some) for some in fleet.asked] == [16, 16, 8]


@pytest.mark.parametrize(("gone", "is_noted"), [(False, True), (True, False)])
def test_a_login_says_nothing_without_the_ssh_agent(tmp_path, inventory, fleet, monkeypatch, gone, is_noted):
    """The user has logged out, and the agent of the login is gone; the next login brings another one."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        if not gone:
            agent.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        fleet.refusing, fleet.broken = {"h01"}, {"h02": "no route to host"}
        found = look_at(tmp_path, inventory, ["h01", "h02", "h03"])
    assert ("h01" in found) == ("h01" in known(tmp_path)) == is_noted
    assert found["h02"] is not None and found["h03"] is None


def test_a_failed_login_of_a_timer_says_nothing(tmp_path, inventory, fleet, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    now_s = time.time()
    Machines(tmp_path).note({f"{host.name}:22": Machine(host.name, now_s) for host in inventory.hosts[2:]})
    out = Out("docker", "no engine", now_s - 60)
    Machines(tmp_path).note({"h02:22": Machine("h02", now_s - 60, out=out)})
    fleet.refusing = {"h01", "h02"}
    look_round(tmp_path, [inventory.source], by_timer=True)
    assert fleet.asked == [["h02", "h01"]], "once"
    assert "h01" not in known(tmp_path) and known(tmp_path)["h02"].out == out
    look_round(tmp_path, [inventory.source])
    assert known(tmp_path)["h01"].out.check == known(tmp_path)["h02"].out.check == "ssh"


@pytest.mark.parametrize(("hosts", "is_set", "outs"), [
    (["h01"], True, {"h01"}), (["h01"], False, set()), (["h01", "h02"], False, set()),
    (["h01", "h02", "h03", "h04"], False, {"h01"}), (["h02", "h03", "h04"], False, set()),
])  # fmt: skip
def test_a_wrong_clock_of_the_head_takes_no_host_out(tmp_path, inventory, fleet, monkeypatch, hosts, is_set, outs):
    """The clock of h01 differs from the head's by an hour, and from those of the other hosts."""
    monkeypatch.setattr(looking.clock, "is_synchronised", lambda: is_set)
    fleet.offsets = {"h01": 3600.0}
    found = look_at(tmp_path, inventory, hosts)
    assert {host for host, out in found.items() if out is not None} == outs
    assert {out.check for out in found.values() if out is not None} <= {"clock"}


def test_a_step_of_the_heads_clock_takes_no_host_out(tmp_path, inventory, fleet, monkeypatch):
    monkeypatch.setattr(looking.clock, "is_synchronised", lambda: False)
    fleet.offsets = {host.name: -90_000.0 for host in inventory.hosts}
    for some in (["h01"], ["h01", "h02"], [host.name for host in inventory.hosts]):
        assert set(look_at(tmp_path, inventory, some).values()) == {None}


def test_one_round_runs_at_a_time(tmp_path, inventory, fleet):
    with Machines(tmp_path).own_lock("looking"):
        look_round(tmp_path, [inventory.source])
    assert fleet.asked == []


def test_a_round_begins_no_look_when_its_time_is_over(tmp_path, inventory, fleet, monkeypatch):
    monkeypatch.setattr(looking, "BEGIN_WITHIN_S", -1.0)
    look_round(tmp_path, [inventory.source])
    assert fleet.asked == []


def test_the_process_ends_by_itself(tmp_path):
    """The kernel ends it, whatever it waits for."""
    code = (
        "import sys, time\nfrom gpurun.head import looking\nlooking.ROUND_S = 1\n"
        "looking.look_round = lambda *_, **__: time.sleep(60)\nsys.exit(looking.main([]))"
    )
    environ = {**os.environ, "GPURUN_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == -signal.SIGALRM
