"""Hosts that are out: what ``status``, ``inventory list``, ``why`` and the other views say of them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace

import pytest
from json_shapes import printed_problems

from gpurun.cli.main import main
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import Restart, StartFailure
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.look import Cluster
from gpurun.state.hosts import Machine, Machines, Out
from gpurun.views import lines
from gpurun.views.page import cluster_body
from gpurun.views.reading import read_cluster

TEXT = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""
DEAD = Out("reach", "no answer from h1", 0.0, "switch it on")


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def home(tmp_path, monkeypatch, nothing_resumes):
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    (tmp_path / "inventory.yaml").write_text(TEXT)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
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


def looked(home, *hosts, out=None, ago_s=1.0, out_for_s=5405.0):
    """What this user's last look at hosts found."""
    now_s, inventory = time.time(), load_inventory(home.parent / "inventory.yaml")
    why = None if out is None else Out(out.check, out.reason, now_s - out_for_s, out.remedy)
    Machines(home).note(
        {inventory.by_name[name].machine: Machine(name, now_s - ago_s, "", why, inventory.source) for name in hosts}
    )


def submit(home, **wants):
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 4, "command": ("true",), **wants})
    return JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=time.time())


def test_status_shows_why_a_host_is_out_since_when_and_what_to_do_and_its_gpus_are_not_free(gpurun, home):
    looked(home, "h2", "h3", "h4")
    looked(home, "h1", out=DEAD)
    lines = gpurun("status").out.splitlines()
    assert "r1  pascal  4 hosts  12 of 16 GPUs free" in lines
    assert "  h1 xxxx out" in lines and "  h[2-4] ...." in lines
    assert "h1: out for 1h30m: no answer from h1" in lines and "  → switch it on" in lines
    assert lines[-1] == "12 of 16 GPUs free on 4 hosts"
    assert any("x on a host that is out" in line for line in lines)
    hosts = {row["host"]: row for row in gpurun("status", "--json").json["hosts"]}
    assert (hosts["h1"]["state"], hosts["h1"]["free"], hosts["h2"]["state"], hosts["h2"]["free"]) == ("out", 0, "ok", 4)
    assert hosts["h1"]["out"]["reason"] == "no answer from h1" and "out" not in hosts["h2"]
    assert time.time() - hosts["h2"]["seen_s"] < 60


def test_a_host_that_is_back_is_as_before(gpurun, home):
    looked(home, "h1", "h2", "h3", "h4", out=DEAD)
    looked(home, "h1", "h2", "h3", "h4")
    said = gpurun("status").out
    assert "out" not in said and said.endswith("16 of 16 GPUs free on 4 hosts\n")


def test_a_cordoned_host_that_is_out_says_both(gpurun, home):
    looked(home, "h1", "h2", "h3", "h4")
    looked(home, "h1", out=DEAD)
    gpurun("inventory", "cordon", "h1", "--reason", "fan")
    assert "  h1 xxxx cordoned, out" in gpurun("status").out
    (row,) = gpurun("inventory", "list", "h1", "--json").json["hosts"]
    assert row["state"] == "cordoned" and row["out"]["check"] == "reach"
    assert ": fan; out: no answer from h1" in gpurun("inventory", "list", "h1").out
    gpurun("inventory", "drain", "h1")
    assert gpurun("inventory", "list", "h1", "--json").json["hosts"][0]["state"] == "drained"
    assert "drained, out" in gpurun("status").out and "drained by " in gpurun("inventory", "list", "h1").out


def test_uncordon_says_that_a_host_is_out_and_what_brings_it_back(gpurun, home):
    looked(home, "h1", out=DEAD)
    said = gpurun("inventory", "uncordon", "h[1-2]")
    assert (
        "h1: out: no answer from h1; the host gets jobs again when a check passes. "
        "`gpurun doctor h1` checks the host now" in said.err
    )
    assert gpurun("inventory", "uncordon", "h1", "--json").json["changed"] == []


def test_inventory_list_shows_it_and_at_out_names_such_hosts(gpurun, home):
    looked(home, "h2", "h3", out=DEAD)
    assert "out: no answer from h1" in gpurun("inventory", "list").out
    rows = gpurun("inventory", "list", "@out", "--json").json["hosts"]
    assert [(row["name"], row["state"], row["cordon"]) for row in rows] == [("h2", "out", None), ("h3", "out", None)]
    assert gpurun("inventory", "show", "h2").code == 0


def test_why_names_the_hosts_that_are_out_and_when_they_are_looked_at(gpurun, home, monkeypatch):
    looked(home, "h1", "h2", "h3", "h4", out=DEAD)
    job = submit(home)
    said = gpurun("why", job.id)
    assert "h[1-4]: out for 1h30m: no answer from h1" in said.out and "→ switch it on" in said.out
    assert "no gpurun process checks these hosts now; run `gpurun doctor` to check the hosts" in said.out
    monkeypatch.setattr("gpurun.leases.look.WaiterLocks.lives", lambda *_: True)
    assert "gpurun checks these hosts again within 30 s" in gpurun("why", job.id).out
    told = gpurun("why", job.id, "--json").json
    assert set(told["out"]) == {"h1", "h2", "h3", "h4"} and told["out"]["h1"]["remedy"] == "switch it on"
    assert told["state"] == "waits" and [group["free"] for group in told["groups"]] == [0]
    assert "4 free" not in said.out


def test_why_says_once_why_a_host_is_out(gpurun, home):
    """It is in the way, it could not start the job, and the last attempt ended by it."""
    looked(home, "h2", "h3", "h4")
    looked(home, "h1", out=DEAD)
    job, now_s = submit(home, gpus=16), time.time()
    failures = (StartFailure("h1", 0, "connect", "w", DEAD.reason, now_s, now_s),)
    job.write(job.record().but(start_failures=failures, reason=f"h1: {DEAD.reason}"))
    said = gpurun("why", job.id)
    assert said.out.startswith(f"{job.record().name} ({job.id}) waits: the job needs 16 GPUs; ")
    assert said.out.count(job.id) == 1
    assert said.out.count(DEAD.reason) == 1 and "    h1: out for 1h30m: " in said.out
    assert "could not start the job" not in said.out and "last attempt" not in said.out
    told = gpurun("why", job.id, "--json").json
    assert DEAD.reason in told["reason"] and DEAD.reason in told["start_failures"][0]["reason"]
    job.write(job.record().but(restart=Restart(now_s + 60.0, 0, None), reason="h1: no answer"))
    assert gpurun("why", job.id).out.count(DEAD.reason) == 1
    job.write(job.record().but(restart=None, start_failures=(), reason="moved: h9 is drained"))
    assert "  the job's last attempt ended: moved: h9 is drained" in gpurun("why", job.id).out


def test_why_is_silent_about_hosts_that_the_job_could_not_use_anyhow(gpurun, home):
    looked(home, "h1", "h2", out=DEAD)
    looked(home, "h3", "h4")
    job = submit(home, gpus=8, constraints=Constraints(hosts=("h2", "h3")))
    told = gpurun("why", job.id, "--json").json
    assert list(told["out"]) == ["h2"]


@pytest.mark.parametrize(
    ("ago_s", "said"),
    [
        (10.0, ""),
        (400.0, ""),
        (3600.0, "h[1-4]: last checked 1h00m ago"),
        (-1e6, ""),
        (None, "h[1-4]: never checked"),
    ],
)
def test_status_says_how_old_its_knowledge_is_while_nobody_looks(gpurun, home, ago_s, said):
    if ago_s is not None:
        looked(home, "h1", "h2", "h3", "h4", ago_s=ago_s)
    lines = [line for line in gpurun("status").out.splitlines() if "doctor" in line]
    assert lines == ([f"{said}; `gpurun doctor` checks now"] if said else [])


def test_while_a_waiter_lives_it_looks(gpurun, home, monkeypatch):
    monkeypatch.setattr("gpurun.leases.look.WaiterLocks.lives", lambda *_: True)
    assert "look" not in gpurun("status").out


def test_hostile_reasons_steer_no_terminal_and_no_page(gpurun, home):
    hostile = Out("reach", "\x1b[2J<script>\nx\u202e", 0.0, "\x1b[2J`rm`")
    looked(home, "h1", out=hostile)
    job = submit(home, gpus=16)
    for argv in (("status",), ("inventory", "list"), ("why", job.id)):
        said = gpurun(*argv).out
        assert "\x1b" not in said and "\u202e" not in said and "script" in said
    reading = read_cluster(Cluster(load_inventory(home.parent / "inventory.yaml"), home), JobStore(home))
    page = cluster_body(reading.picture, (), (), ",".join, str, str)
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"machines": 7}', b'{"machines": {"h1:22": {"name": 1}}}', b"\xff"]
)
def test_a_damaged_file_of_looks_is_nothing_known(gpurun, home, data):
    looked(home, "h1", out=DEAD)
    (Machines(home).folder().plain / f"{os.getuid()}.json").write_bytes(data)
    said = gpurun("status")
    assert said.code == 0 and said.out.endswith("16 of 16 GPUs free on 4 hosts\n")


def test_many_reasons_are_counted(gpurun, home):
    for at in range(1, 5):
        looked(home, f"h{at}", out=Out("reach", f"reason {at}", 0.0))
    assert len([line for line in gpurun("status").out.splitlines() if "out for" in line]) == 4
    shown = [lines.plain(each) for each in lines.out_lines(
        [(f"h{at}", lines.OutHost(f"reason {at}", "", 1.0)) for at in range(20)], ",".join, str)]  # fmt: skip
    assert len(shown) == 9 and shown[-1].startswith("… and 12 more hosts are out")


def test_hosts_of_which_the_same_is_said_but_for_their_names_share_a_line(gpurun, home):
    """Each host whose name does not resolve had lines of its own."""
    for at in range(1, 5):
        why = f"the name 'h{at}' cannot be resolved: [Errno -2] Name or service not known"
        looked(home, f"h{at}", out=Out("reach", why, 0.0, f"correct DNS for h{at}"))
    job, now_s = submit(home, gpus=16), time.time()
    failures = tuple(
        StartFailure(f"k{at}", 0, "docker", "w", f"k{at}: no container on k{at}0", now_s, now_s) for at in range(1, 4)
    )
    job.write(job.record().but(start_failures=failures))
    out = gpurun("why", job.id).out
    assert "    h[1-4]: out for 1h30m: the name 'h[1-4]' cannot be resolved: [Errno -2]" in out
    assert "      → correct DNS for h[1-4]\n" in out and out.count("cannot be resolved") == 1
    assert "    h[1-4]: out\n" in out and out.count(": out\n") == 1
    assert out.count("no container") == 3, "another host's name is not the host's own"
    odd = {"a.b": ("a.b at a.b.c, not xa.b, a.bc or a.b-2",), "c": ("c at c.c, not xa.b, a.bc or a.b-2",), "\0": ("x",)}
    assert lines.alike(odd, ",".join) == [
        (["a.b", "c"], ("a.b,c at a.b,c.c, not xa.b, a.bc or a.b-2",)),
        (["\0"], ("x",)),
    ]


def test_why_names_how_much_room_each_host_lacks_and_when_it_is_tried_again(gpurun, home):
    looked(home, "h1", "h2", "h3", "h4")
    full = "its disk is too full: 100 MiB free in /var/lib/docker, 12544 MiB needed"
    now_s = time.time()
    failures = [
        StartFailure("h1", 1, "no-space", "w", full, now_s, now_s + 40.0, True, 1, 12444),
        StartFailure("h2", 1, "no-space", "w", full, now_s, now_s - 1.0, True, 2, 512),
        StartFailure("h3", 1, "docker", "w", "\x1b[2Jrefused", now_s, now_s),
    ]
    job = submit(home, gpus=16)
    job.write(job.record().but(start_failures=tuple(failures), reason="no room"))
    lines = gpurun("why", job.id).out.splitlines()
    at = lines.index("  hosts that could not start the job:")
    assert lines[at + 1].startswith(f"    h1: {full} (12.2 GiB more needed); gpurun tries again in ")
    assert lines[at + 2] == f"    h2: {full} (0.5 GiB more needed)"
    assert lines[at + 3] == "    h3: \\x1b[2Jrefused"
    told = gpurun("why", job.id, "--json").json["start_failures"]
    assert [(each["host"], each["lacks_mib"]) for each in told] == [("h1", 12444), ("h2", 512), ("h3", 0)]
    many = tuple(replace(failures[0], host=f"h{at}", lacks_mib=1024 * at + 512) for at in range(20))
    job.write(job.record().but(start_failures=many, restart=Restart(now_s + 60.0, 0, None)))
    said = gpurun("why", job.id)
    assert said.out.count("GiB more needed") == 8 and "… and 12 more hosts" in said.out and "out for" not in said.out
    looked(home, "h2", "h3", out=DEAD)
    job.write(job.record().but(start_failures=tuple(failures)))
    assert "h[2-3]: out for 1h30m: no answer from h1" in gpurun("why", job.id).out
    job.write(job.record().but(start_failures=many))
    assert len(gpurun("why", job.id, "--json").json["start_failures"]) == 20
