"""When hosts are looked at again, by a waiter and by a timer."""

import os
import time

import pytest

from gpurun.head import looks
from gpurun.head.looks import AGAIN_S, FIRST_LOOK_S, UNHEARD_S, WaiterLooks, due_hosts, due_in_s
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state.hosts import Machine, Machines, Out

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""
NOW_S = 1_000_000.0
OUT = Out("ssh", "no route to host", NOW_S)


@pytest.fixture
def inventory(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return load_inventory(tmp_path / "inventory.yaml")


def queue(home, state=State.QUEUED, hosts=()):
    spec = JobSpec(name="n", image="i", gpus=1, command=("true",))
    folder = JobStore(home).create(spec, inventory=home / "inventory.yaml", now_s=1.0)
    if state is State.RUNNING:
        for each in (State.GRANTED, State.PREPARING, State.STARTING, State.RUNNING):
            folder.move(each, granted=tuple(Grant(host, (0,)) for host in hosts))


@pytest.mark.parametrize(("known", "in_s"), [
    (None, 0.0),
    (Machine("h1", NOW_S), UNHEARD_S),
    (Machine("h1", NOW_S - 100), UNHEARD_S - 100),
    (Machine("h1", NOW_S, out=OUT), AGAIN_S),
    (Machine("h1", NOW_S - 10, out=OUT), AGAIN_S - 10),
    (Machine("h1", NOW_S + 1), 0.0),
    (Machine("h1", NOW_S + 1e9, out=OUT), 0.0),
    (Machine("h1", NOW_S - 1e9), UNHEARD_S - 1e9),
])  # fmt: skip
def test_when_a_look_is_due(known, in_s):
    assert due_in_s(known, NOW_S) == in_s


def test_a_running_gang_is_as_good_as_a_look_unless_its_host_is_out():
    assert due_in_s(None, NOW_S, is_heard=True) == UNHEARD_S
    assert due_in_s(Machine("h1", NOW_S - 20, out=OUT), NOW_S, is_heard=True) <= 0


def test_hosts_that_are_out_are_looked_at_first(inventory):
    known = {"h1:22": Machine("h1", NOW_S), "h4:22": Machine("h4", NOW_S - 60, out=OUT)}
    assert due_hosts(inventory, known, {"h2"}, NOW_S) == ("h4", "h3")


@pytest.mark.parametrize(("outs", "others", "expected"), [
    (20, 20, (8, 8)), (20, 3, (13, 3)), (3, 20, (3, 13)), (0, 20, (0, 16)), (20, 0, (16, 0)), (2, 1, (2, 1)),
])  # fmt: skip
def test_hosts_that_are_out_take_at_most_half_of_a_batch(tmp_path, outs, others, expected):
    (tmp_path / "many.yaml").write_text(INVENTORY.replace("h[1-4]", f"h[1-{outs + others}]"))
    known = {f"h{n}:22": Machine(f"h{n}", NOW_S - 60, out=OUT) for n in range(1, outs + 1)}
    found = due_hosts(load_inventory(tmp_path / "many.yaml"), known, (), NOW_S, most=16)
    assert (sum(f"{host}:22" in known for host in found), len(set(found))) == (expected[0], sum(expected))
    assert all(f"{host}:22" in known for host in found[: expected[0]]), "first"


def test_only_inventories_of_this_users_queued_jobs_are_looked_at(tmp_path, inventory):
    queue(tmp_path, State.RUNNING, ["h1"])
    records = list(JobStore(tmp_path).live_records())
    assert looks.queued_in(records, os.getuid()) == ()
    assert looks.heard_in(records, os.getuid(), inventory.source) == {"h1"}
    assert looks.heard_in(records, os.getuid() + 1, inventory.source) == frozenset()
    queue(tmp_path)
    records = list(JobStore(tmp_path).live_records())
    assert looks.queued_in(records, os.getuid()) == (inventory.source,)
    assert looks.queued_in(records, os.getuid() + 1) == ()


def test_a_timer_looks_at_what_was_looked_at_before(tmp_path, inventory):
    Machines(tmp_path).note({"h1:22": Machine("h1", NOW_S, inventory=inventory.source)})
    Machines(tmp_path).note({"x:22": Machine("x", NOW_S, inventory="/nowhere.yaml")})
    environ = {"HOME": str(tmp_path)}
    assert set(looks.HostLooks(tmp_path, environ).known_inventories()) >= {inventory.source, "/nowhere.yaml"}
    assert [each.source for each in looks.loaded(["/nowhere.yaml", inventory.source])] == [inventory.source]
    Machines(tmp_path).note({"h1:22": Machine("h1", time.time(), inventory=inventory.source)})
    assert looks.HostLooks(tmp_path).due_in(inventory) == ("h2", "h3", "h4")


@pytest.fixture
def waiting(tmp_path, inventory, monkeypatch, own_copy):
    """A waiter's looks on a clock, with a stand-in for the process."""

    class Clock:
        now_s, running = 0.0, False

        def poll(self):
            return None if self.running else 0

    clock = Clock()
    clock.started = []

    def start(_module, *paths, **_):
        clock.started.append((clock.now_s, paths))
        return clock

    monkeypatch.setattr(looks.children, "start_detached", start)
    own_copy(looks, "time", time=lambda: NOW_S + clock.now_s)
    clock.looks = WaiterLooks(tmp_path, {}, clock=lambda: clock.now_s)

    def until(end_s):
        """Tick; nothing changes, so the passes come every 15 s."""
        while clock.now_s < end_s:
            if clock.now_s % 15 == 0:
                clock.looks.plan({inventory.source: inventory})
            clock.looks.start_if_due()
            clock.now_s += 0.5

    clock.until = until
    return clock


def all_seen(home, inventory, out=None):
    Machines(home).note({host.machine: Machine(host.name, NOW_S, out=out) for host in inventory.hosts})


def test_a_waiter_looks_at_hosts_that_nobody_knows_a_moment_after_it_begins(tmp_path, inventory, waiting):
    queue(tmp_path)
    waiting.until(FIRST_LOOK_S + AGAIN_S - 1)
    assert waiting.started == [(FIRST_LOOK_S, (inventory.source,))]


def test_a_waiter_that_knows_all_hosts_starts_nothing(tmp_path, inventory, waiting):
    queue(tmp_path)
    all_seen(tmp_path, inventory)
    waiting.until(60)
    assert waiting.started == []


def test_a_host_that_is_out_is_looked_at_again_within_30_s(tmp_path, inventory, waiting):
    queue(tmp_path)
    all_seen(tmp_path, inventory)
    Machines(tmp_path).note({"h1:22": Machine("h1", NOW_S, out=OUT)})
    waiting.until(31)
    assert waiting.started and waiting.started[0][0] <= 30


def test_a_look_that_notes_nothing_is_not_made_without_a_pause(tmp_path, inventory, waiting):
    queue(tmp_path)
    waiting.until(61)
    assert 4 <= len(waiting.started) <= 61 / AGAIN_S


def test_two_looks_never_run_at_once(tmp_path, inventory, waiting):
    queue(tmp_path)
    waiting.running = True
    waiting.until(100)
    assert len(waiting.started) == 1


def test_a_waiter_without_queued_jobs_starts_nothing(tmp_path, inventory, waiting):
    queue(tmp_path, State.RUNNING, ["h1"])
    waiting.until(60)
    assert waiting.started == []


EACH_S, LATE_S = 60.0, 5.0
"""systemd starts a minutely unit of AccuracySec=5s in this time (`gpurun.head.waiter`)."""
LOOK_S = 25.0
"""A look at a host that is off, from the timer's start to the note, on a busy head."""


@pytest.mark.parametrize("look_s", [0.5, LOOK_S])
@pytest.mark.parametrize("repaired_s", [0.1, 15.0, 24.0, 26.0, 59.9, 61.0, 64.9, 85.0, 119.0])
def test_a_timer_alone_notices_a_repair_within_120_s(tmp_path, inventory, monkeypatch, own_copy, repaired_s, look_s):
    """Each look is as late as it may be. One that began before the repair still finds the host out."""
    now_s, ends = [NOW_S], []
    own_copy(looks, "time", time=lambda: now_s[0])
    monkeypatch.setattr(looks.children, "start_detached", lambda *_, **__: ends.append(now_s[0] + look_s))
    Machines(tmp_path).note({"h1:22": Machine("h1", NOW_S - 30, out=OUT, inventory=inventory.source)})
    Machines(tmp_path).note({host.machine: Machine(host.name, NOW_S) for host in inventory.hosts[1:]})
    for tick in range(5):
        now_s[0] = NOW_S + EACH_S * tick + (LATE_S if tick % 2 else 0.0)
        looks.HostLooks(tmp_path, {"HOME": str(tmp_path)}).look_by_timer()
        for end_s in ends:
            out = None if now_s[0] >= NOW_S + repaired_s else OUT
            Machines(tmp_path).note({"h1:22": Machine("h1", end_s, out=out, inventory=inventory.source)})
            if out is None:
                assert end_s - NOW_S - repaired_s <= 120
                return
        ends.clear()
    pytest.fail("no look after the repair")


@pytest.mark.parametrize(("machine", "looks_at"), [
    (Machine("h1", NOW_S - 61, out=OUT), True), (Machine("h1", NOW_S - 30, out=OUT), False),
    (Machine("h1", NOW_S - 1e6), False), (Machine("h1", NOW_S + 1e6, out=OUT), True), (None, False),
])  # fmt: skip
def test_a_gang_that_wants_to_grow_has_hosts_looked_at_that_are_out(
    tmp_path, inventory, monkeypatch, own_copy, machine, looks_at
):
    """It may be the only one of its user's that waits, without a waiter and without a timer."""
    started = []
    monkeypatch.setattr(looks.children, "start_detached", lambda *words, **_: started.append(words))
    own_copy(looks, "time", time=lambda: NOW_S)
    Machines(tmp_path).note({"h1:22": machine} if machine else {})
    looks.HostLooks(tmp_path, {}).look_while_growing(inventory)
    assert started == ([("gpurun.head.looking", inventory.source)] if looks_at else [])
