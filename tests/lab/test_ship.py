"""Shipping on real hosts, with real engines and links, and with failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from imaging import MIB, NAMES, Head, OnHost, layer
from waiting import until

from gpurun.content import chain, images
from gpurun.content.ship import ShipCancelled, plan, ship
from gpurun.errors import BadInput, HostFailure, HostNotReady, HostUnreachable
from gpurun.inventory.read import load_inventory
from gpurun.lab import Lab, LabSpec, network
from gpurun.remote import Fleet
from gpurun.remote.route import target_of

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("ship")]

HOSTS = ["gpu-r1-01", "gpu-r1-02", "gpu-r2-01", "gpu-r2-02"]
# The overhead of TLS, TCP, IP, Ethernet and SSH, and of messages between hosts.
OVERHEAD = 1.02
TALK_BYTES = 600_000


@pytest.fixture(scope="module")
def ship_lab():
    """A lab with links slow enough to be the bottleneck."""
    lab = Lab(f"ship{os.getpid()}")
    lab.up(LabSpec(lab.name, host_link_bps=400_000_000, rack_uplink_bps=400_000_000, disk_mib=1024))
    yield lab
    lab.down(purge=True)


@pytest.fixture
def lab(ship_lab):
    """Every host on, every cable in, no image on any."""
    ship_lab.up(LabSpec(ship_lab.name, host_link_bps=400_000_000, rack_uplink_bps=400_000_000, disk_mib=1024))
    for host in HOSTS:
        there = OnHost(ship_lab, host)
        there.forget(*there.images())
        ship_lab.run(host, ["rm", "-rf", "/home/train/.cache", "/home/train/.local"])
    return ship_lab


@pytest.fixture
def inventory(lab):
    return load_inventory(lab.inventory)


@pytest.fixture
def fleet(lab, inventory):
    with Fleet.open([target_of(inventory.by_name[host], inventory) for host in HOSTS], dead_after_s=6.0) as opened:
        assert not opened.failures
        yield opened


@pytest.fixture
def head(inventory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Head(inventory.docker_host)
    yield made
    made.close()


@pytest.fixture
def send(fleet, inventory):
    """Ship to some hosts (all), and see that it went well."""

    def do(image, hosts=HOSTS, **options):
        return ship(image, fleet, inventory=inventory, hosts=hosts, docker_host=inventory.docker_host, **options)

    return do


def states(report):
    return {host.host: host.state for host in report.hosts}


def same_everywhere(lab, made, hosts=HOSTS):
    for host in hosts:
        there = OnHost(lab, host)
        found = there.inspect(made.name)
        assert found is not None, host
        assert found["Id"] == made.id
        assert found["RootFS"]["Layers"] == list(made.layers)
        assert there.saved_layers(made.name) == list(made.layers)


def nothing_left(lab, hosts=HOSTS):
    for host in hosts:
        assert OnHost(lab, host).spool() == [], host


@pytest.mark.story
def test_the_same_image_everywhere_and_each_byte_once_over_every_link(lab, head, send):
    made = head.make(
        f"{NAMES}/a:1", [layer("a", 6 * MIB), layer("b", 100), layer("c", 14 * MIB), layer("b", 100), layer("d", 5)]
    )
    before = network.traffic(lab.name)
    report = send(f"{NAMES}/a:1")
    after = network.traffic(lab.name)
    assert states(report) == dict.fromkeys(HOSTS, "done")
    same_everywhere(lab, made)
    nothing_left(lab)
    for host in HOSTS:  # what held layers until the whole was there is gone
        assert OnHost(lab, host).images() == {made.id}
    missing = report.bytes_missing
    assert missing == made.bytes - len(layer("b", 100))  # a layer that comes twice is sent once
    assert {host.bytes_received for host in report.hosts} == {missing}
    for rack in ("r1", "r2"):
        crossed = after[f"{rack}-up"].to_bytes - before[f"{rack}-up"].to_bytes
        assert missing <= crossed <= OVERHEAD * missing + TALK_BYTES
    sent = after["head"].from_bytes - before["head"].from_bytes
    assert missing <= sent <= OVERHEAD * missing + TALK_BYTES


def test_hosts_that_have_none_some_all_or_others_layers(lab, head, send):
    base = [layer("base", 3 * MIB), layer("mid", MIB)]
    wanted = head.make(f"{NAMES}/b:2", [*base, layer("top", MIB)], Env=["A=b c"])
    head.make(f"{NAMES}/b:1", base)
    head.make(f"{NAMES}/b:other", [layer("mid", MIB), layer("top", MIB)])  # the same layers on other parents
    send(f"{NAMES}/b:1", ["gpu-r1-01"])
    send(f"{NAMES}/b:2", ["gpu-r1-02"])
    send(f"{NAMES}/b:other", ["gpu-r2-01"])
    report = send(f"{NAMES}/b:2")
    assert states(report) == {"gpu-r1-01": "done", "gpu-r1-02": "present", "gpu-r2-01": "done", "gpu-r2-02": "done"}
    received = {host.host: host.bytes_received for host in report.hosts}
    assert received["gpu-r1-02"] == 0 and received["gpu-r2-01"] == wanted.bytes
    assert len(layer("top", MIB)) <= received["gpu-r1-01"] < 2 * MIB
    same_everywhere(lab, wanted)
    nothing_left(lab)


def test_an_image_that_is_not_there(send):
    for name in (f"{NAMES}/none:1", "a b", "../x", "-v", f"{NAMES}/none:1;touch /tmp/x", ""):
        with pytest.raises(BadInput):
            send(name)


def test_the_plan_is_what_happens_and_of_what_is_there_only_a_name_is_given(
    lab, fleet, inventory, head, send, tmp_path
):
    """Between plan and transfer, a file of the head's layer store is damaged: it is made again."""
    made = head.make(f"{NAMES}/p:1", [layer("p", 2 * MIB), layer("q", MIB)])
    send(f"{NAMES}/p:1", ["gpu-r1-01"])
    stored = next(path for path in (tmp_path / "cache/gpurun/layers/sha256").iterdir() if path.stat().st_size > 2 * MIB)
    content = bytearray(stored.read_bytes())
    content[MIB] ^= 255
    stored.write_bytes(content)
    others = HOSTS[1:]
    planned = plan(f"{NAMES}/p:1", fleet, inventory=inventory, hosts=HOSTS, docker_host=inventory.docker_host)
    assert [hop.host for hop in planned.chains[0]] == others and planned.shape == "chain"
    assert abs(planned.bytes_missing - 3 * MIB) < 100_000
    assert {host for each in planned.layers for host in each.hosts} == set(others)
    assert states(send(f"{NAMES}/p:1")) == {**dict.fromkeys(others, "done"), "gpu-r1-01": "present"}
    same_everywhere(lab, made)
    again = plan(f"{NAMES}/p:1", fleet, inventory=inventory, hosts=HOSTS, docker_host=inventory.docker_host)
    assert again.shape == "nothing" and set(again.present) == set(HOSTS) and again.bytes_missing == 0
    head.docker("tag", f"{NAMES}/p:1", f"{NAMES}/renamed:x")
    head.made.append(f"{NAMES}/renamed:x")
    report = send(f"{NAMES}/renamed:x")
    assert states(report) == dict.fromkeys(HOSTS, "present") and report.bytes_missing == 0
    assert OnHost(lab, HOSTS[3]).inspect(f"{NAMES}/renamed:x")["Id"] == made.id


def in_the_middle(act, after_bytes=2 * MIB):
    """Return a `progress` that acts once, when a host has received this much."""
    done = []

    def told(event):
        if event.bytes >= after_bytes and not done:
            done.append(event.host)
            threading.Thread(target=act, daemon=True).start()

    return told


def test_hosts_that_go_in_the_middle_stop_no_other(lab, head, send):
    """The first host of the chain loses its power, a later one its cable."""
    made = head.make(f"{NAMES}/d:1", [layer("d", 16 * MIB)])

    def act():
        lab.crash("gpu-r1-01")
        lab.cut("gpu-r2-01")

    report = send(f"{NAMES}/d:1", progress=in_the_middle(act), rate_bytes_s=5 * MIB)
    others = ["gpu-r1-02", "gpu-r2-02"]
    assert states(report) == {**dict.fromkeys(others, "done"), "gpu-r1-01": "failed", "gpu-r2-01": "failed"}
    assert all(isinstance(error, HostUnreachable) for error in report.failed.values())
    same_everywhere(lab, made, others)
    nothing_left(lab, others)


def test_a_slow_host_does_not_hold_up_the_others(lab, head, send, monkeypatch):
    monkeypatch.setattr(chain, "BACKLOG_BYTES", 3 * MIB)  # seen sooner, so that a small image is enough
    head.make(f"{NAMES}/e:1", [layer("e", 24 * MIB)])
    loading = []

    def told(event):
        if event.state == "loading" and event.host not in loading:
            loading.append(event.host)

    lab.shape("gpu-r1-02", 20_000_000)  # a twentieth: 10 s for what takes the others half a second
    report = send(f"{NAMES}/e:1", [*HOSTS], progress=told)
    assert states(report) == dict.fromkeys(HOSTS, "done")
    assert loading[-1] == "gpu-r1-02", loading


def fill_disk(lab, host, but_mib):
    """Fill a host's disk except this much."""
    free_kib = lab.run(host, ["df", "--output=avail", "-k", "/var/lib/docker"]).stdout.split()[-1]
    size = int(free_kib) - but_mib * 1024
    assert lab.run(host, ["fallocate", "-l", f"{size}K", "/var/lib/docker/filler"]).code == 0


def test_a_full_disk_is_that_hosts_failure_and_seen_before_anything_is_sent_to_it(lab, head, send):
    """One host's disk is full from the beginning, another one's fills up in the middle."""
    made = head.make(f"{NAMES}/g:1", [layer("g", 16 * MIB)])
    fill_disk(lab, "gpu-r2-01", but_mib=16)
    try:
        report = send(
            f"{NAMES}/g:1", progress=in_the_middle(lambda: fill_disk(lab, "gpu-r1-01", but_mib=2)), rate_bytes_s=4 * MIB
        )
    finally:
        for host in ("gpu-r1-01", "gpu-r2-01"):
            lab.run(host, ["rm", "-f", "/var/lib/docker/filler"])
    full, others = ["gpu-r1-01", "gpu-r2-01"], ["gpu-r1-02", "gpu-r2-02"]
    assert states(report) == {**dict.fromkeys(others, "done"), **dict.fromkeys(full, "failed")}
    assert all(isinstance(report.failed[host], HostNotReady) for host in full), report.failed
    assert "MiB free" in report.failed["gpu-r2-01"].message and report.failed["gpu-r2-01"].hint
    assert {host.host: host.bytes_received for host in report.hosts}["gpu-r2-01"] == 0
    same_everywhere(lab, made, others)
    assert states(send(f"{NAMES}/g:1")) == {**dict.fromkeys(others, "present"), **dict.fromkeys(full, "done")}
    same_everywhere(lab, made)


SHIP = [sys.executable, "-m", "gpurun", "ship"]


def test_the_head_is_killed_in_the_middle_and_the_next_ship_goes_on(lab, head, send, tmp_path):
    made = head.make(f"{NAMES}/h:1", [layer("h", 20 * MIB)])
    argv = [*SHIP, f"{NAMES}/h:1", "-i", str(lab.inventory), "--rate-limit", "42mbit", "--json"]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPURUN_HOME": str(tmp_path)},
    )
    for line in process.stderr:
        if json.loads(line).get("bytes", 0) > 7 * MIB:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The fleet of this test has an agent on each host, too: one may stay.
    until(lambda: all(lab.run(host, ["ps", "ax"]).stdout.count(b"-ISc") <= 1 for host in HOSTS), every_s=0.2)
    before = network.traffic(lab.name)["head"].from_bytes
    assert states(send(f"{NAMES}/h:1")) == dict.fromkeys(HOSTS, "done")
    assert network.traffic(lab.name)["head"].from_bytes - before < 16 * MIB
    same_everywhere(lab, made)
    nothing_left(lab)


def test_cancelled_in_the_middle_and_out_of_time(lab, head, send):
    made = head.make(f"{NAMES}/i:1", [layer("i", 12 * MIB)])
    stop = []
    with pytest.raises(ShipCancelled, match="cancelled"):
        send(
            f"{NAMES}/i:1",
            progress=in_the_middle(lambda: stop.append(1)),
            cancelled=lambda: bool(stop),
            rate_bytes_s=4 * MIB,
        )
    with pytest.raises(HostFailure, match="deadline of 1s"):
        send(f"{NAMES}/i:1", rate_bytes_s=MIB, deadline_s=1.0)
    for host in HOSTS:
        assert OnHost(lab, host).images() == set()
    assert states(send(f"{NAMES}/i:1")) == dict.fromkeys(HOSTS, "done")
    same_everywhere(lab, made)
    nothing_left(lab)


def test_two_ships_at_once_send_it_once(lab, inventory, head, send):
    head.make(f"{NAMES}/j:1", [layer("j", 10 * MIB)])
    before = network.traffic(lab.name)["head"].from_bytes
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(send(f"{NAMES}/j:1"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(host.state for report in reports for host in report.hosts) == ["done"] * 4 + ["present"] * 4
    assert network.traffic(lab.name)["head"].from_bytes - before < OVERHEAD * 10 * MIB + 2 * TALK_BYTES


def test_a_layer_that_went_away_between_asking_and_loading_is_sent_after_all(lab, head, fleet, inventory, monkeypatch):
    from gpurun.content import ship as module

    base = layer("m1", MIB)
    head.make(f"{NAMES}/m:1", [base])
    made = head.make(f"{NAMES}/m:2", [base, layer("m2", MIB)])
    options = {"inventory": inventory, "docker_host": inventory.docker_host}
    ship(f"{NAMES}/m:1", fleet, hosts=["gpu-r1-01"], **options)
    honest = module.Shipment.plan

    def plan_then_lose(self, answers, full=False):
        made_plan = honest(self, answers, full)
        OnHost(lab, "gpu-r1-01").forget(f"{NAMES}/m:1")
        return made_plan

    monkeypatch.setattr(module.Shipment, "plan", plan_then_lose)
    report = ship(f"{NAMES}/m:2", fleet, hosts=["gpu-r1-01"], **options)
    assert states(report) == {"gpu-r1-01": "done"}
    same_everywhere(lab, made, ["gpu-r1-01"])


def test_hosts_that_may_not_talk_to_each_other(lab, head, fleet, inventory):
    made = head.make(f"{NAMES}/n:1", [layer("n", MIB)])
    fabrics = {name: replace(fabric, host_to_host=False) for name, fabric in inventory.fabrics.items()}
    apart = replace(inventory, fabrics=fabrics)
    report = ship(f"{NAMES}/n:1", fleet, inventory=apart, hosts=HOSTS, docker_host=inventory.docker_host)
    assert states(report) == dict.fromkeys(HOSTS, "done")
    same_everywhere(lab, made)


def test_prune_takes_back_what_gpurun_put_there_and_nothing_else(lab, head, fleet, send):
    mine = head.make(f"{NAMES}/q:1", [layer("q1", MIB)])
    used = head.make(f"{NAMES}/q:2", [layer("q2", MIB)])
    theirs = head.make(f"{NAMES}/q:3", [layer("q3", MIB)])
    also = head.make(f"{NAMES}/q:4", [layer("q4", MIB)])
    there = OnHost(lab, "gpu-r1-01")
    there.docker("load", stdin=head.docker("save", f"{NAMES}/q:3"))
    for name in (f"{NAMES}/q:1", f"{NAMES}/q:2", f"{NAMES}/q:3", f"{NAMES}/q:4"):
        send(name, ["gpu-r1-01"])
    there.docker("create", "--name", "keeps", f"{NAMES}/q:2")
    there.docker("tag", f"{NAMES}/q:4", "somebody/else:1")
    try:
        listed = {one.id: one for one in images.placed(fleet, ["gpu-r1-01"]).ok["gpu-r1-01"]}
        assert set(listed) == {mine.id, used.id, also.id}
        assert listed[used.id].used_by == ("keeps",) and listed[mine.id].names == (f"{NAMES}/q:1",)
        kept = images.prune(fleet, ["gpu-r1-01"], keep=[mine.id]).ok["gpu-r1-01"]
        assert {one.id for one in kept} == {also.id}
        gone = images.prune(fleet, ["gpu-r1-01"], keep=[]).ok["gpu-r1-01"]
        assert {one.id: one.freed for one in gone} == {mine.id: True}
        assert there.images() == {used.id, theirs.id, also.id}
        assert there.inspect("somebody/else:1") is not None and there.inspect(f"{NAMES}/q:4") is None
    finally:
        there.docker("rm", "-f", "keeps")


def test_the_command_line(lab, head, tmp_path):
    head.make(f"{NAMES}/r:1", [layer("r", 2 * MIB)])
    environ = {**os.environ, "GPURUN_HOME": str(tmp_path / "home")}

    def gpurun(*argv):
        return subprocess.run(
            [sys.executable, "-m", "gpurun", *argv, "-i", str(lab.inventory)],
            capture_output=True,
            text=True,
            env=environ,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    dry = json.loads(gpurun("ship", f"{NAMES}/r:1", "gpu-r1-[01-02]", "--dry-run", "--json").stdout)
    assert [hop["host"] for hop in dry["chains"][0]] == ["gpu-r1-01", "gpu-r1-02"]
    assert OnHost(lab, "gpu-r1-01").images() == set()
    fill_disk(lab, "gpu-r2-02", but_mib=1)
    failed = gpurun("ship", f"{NAMES}/r:1", "--json")
    lab.run("gpu-r2-02", ["rm", "-f", "/var/lib/docker/filler"])
    assert failed.returncode == 4
    found = {host["host"]: host["state"] for host in json.loads(failed.stdout)["hosts"]}
    assert found == {**dict.fromkeys(HOSTS, "done"), "gpu-r2-02": "failed"}
    done = gpurun("ship", f"{NAMES}/r:1", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["hosts"][3]["state"] == "done"
    assert set(document) == {"image", "id", "layers", "bytes_missing", "hosts", "elapsed_s"}
    assert all(json.loads(line)["host"] in HOSTS for line in done.stderr.splitlines())
    plain = gpurun("ship", f"{NAMES}/r:1")
    assert plain.returncode == 0 and "already present" in plain.stdout
    assert gpurun("ship", f"{NAMES}/none:1").returncode == 2
    assert gpurun("ship", f"{NAMES}/r:1", "nohost").returncode == 2
    asked = gpurun("images", "--prune")
    assert asked.returncode == 2 and "--yes" in asked.stderr
    pruned = json.loads(gpurun("images", "--prune", "--yes", "--json").stdout)["pruned"]
    assert set(pruned) == set(HOSTS) and all(len(found) == 1 for found in pruned.values())
