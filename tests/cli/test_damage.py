"""Whatever lies in the place of a state file, every command answers: no traceback, no waiting, no GPU granted twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from how_many import count

from gpurun.cli.main import main
from gpurun.head import children
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import CancelRequest
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import Cluster
from gpurun.leases.store import LeaseStore
from gpurun.state.hosts import Cordon, Cordons
from gpurun.views.reading import read_cluster
from gpurun.views.rows import leased_hosts

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
FILES = ["leases/{job}.json", *[f"jobs/{{job}}/{name}" for name in ("state.json", "spec.json")],
         "jobs/{job}/cancel.json", "jobs/{job}/preempt.json",
         "jobs/{job}/events.jsonl", "jobs/{job}/log", "live/{job}", "cordons.json", "deadlines.json"]  # fmt: skip
COMMANDS = [("status",), ("status", "{job}"), ("why", "{waits}"), ("queue",), ("recover",), ("logs", "{job}"),
            ("cancel", "--no-wait", "{job}"), ("cancel", "--no-wait", "{waits}")]  # fmt: skip
BYTES = {
    "empty": b"", "torn": b'{"id": "j-0000', "zeros": b"\0" * 4096, "not utf-8": b"\xff\xfe\xfd", "a list": b"[1]",
    "deep": b"[" * 100_000, "huge number": b'{"version": ' + b"9" * 5000 + b"}", "nan": b'{"granted_s": NaN}',
}  # fmt: skip
THINGS = [*BYTES, "pipe", "folder", "missing", "link to nothing", "link to itself"]


def some(pairs):
    """As many of them as the profile asks for, always the same."""
    return random.Random(1).sample(pairs, min(len(pairs), count("state files with something else in their place")))


def put(path, thing):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if thing in BYTES:
        path.write_bytes(BYTES[thing])
    elif thing == "pipe":
        os.mkfifo(path)
    elif thing == "folder":
        path.mkdir()
    elif thing.startswith("link"):
        path.symlink_to("nowhere" if thing == "link to nothing" else path.name)


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A job that holds both GPUs, its lease held by this process, and one that waits."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    nobody = SimpleNamespace(Popen=lambda *_, **__: None, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(children, "subprocess", nobody)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    store = JobStore(tmp_path / "home")
    spec = JobSpec(name="n", image="i", gpus=2, command=("true",))
    ids = [store.create(spec, inventory=tmp_path / "inventory.yaml", now_s=float(n)).id for n in range(2)]
    ((lease, lock),) = Allocator(store.home).run_pass(now_s=3.0).granted
    store.get(lease.job).ask_to_cancel(CancelRequest("preempt", "me", 1.0))
    with Cordons(store.home).changing() as cordons:
        cordons["h9"] = Cordon("draining", "me", 1.0, "", until_s=2e9)
    yield {"job": lease.job, "waits": next(job for job in ids if job != lease.job)}
    lock.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("file", "thing"), some([(file, thing) for file in FILES for thing in THINGS]))
def test_every_command_answers(jobs, tmp_path, capsys, file, thing):
    path = tmp_path / "home" / file.format_map(jobs)
    put(path, thing)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([word.format_map(jobs) for word in command])
        allowed = (0,) if file.endswith(("cancel.json", "preempt.json")) else (0, 2, 5)
        assert ended.value.code in allowed, (command, capsys.readouterr().err)
    if file.startswith("leases/") and thing != "missing":
        assert os.path.lexists(path)
        assert LeaseStore(tmp_path / "home").read_all().leases == ()


HOLDER = {"gpus": [0], "job": "j-0000abcd"}
RECORDS = {
    "a NUL in the inventory's path": {"inventory": "/a\0b"},
    "a number of 100 digits": {"attempt": int("9" * 100)},
    **{f"a refusal of GPUs {gpus}": {"refusals": [
        {"host": "h1", "holder": {**HOLDER, "gpus": gpus}, "until_s": 9e9, "pause_s": 5.0}
    ]} for gpus in ([-1], [0, 0], [1024], [10**30])},
}  # fmt: skip


@pytest.mark.parametrize("file", ["leases/{job}.json", "jobs/{job}/state.json", "jobs/{waits}/state.json"])
@pytest.mark.parametrize("what", RECORDS)
def test_every_command_answers_though_a_record_has_a_value_that_gpurun_cannot_use(jobs, tmp_path, capsys, what, file):
    path = tmp_path / "home" / file.format_map(jobs)
    path.write_text(json.dumps({**json.loads(path.read_text()), **RECORDS[what]}))
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([word.format_map(jobs) for word in command])
        assert ended.value.code in (0, 2, 5), (command, capsys.readouterr().err)


def status(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json"])
    said = capsys.readouterr()
    (host,) = json.loads(said.out)["hosts"]
    return ended.value.code, host["free"], host["state"], said.err


@pytest.mark.parametrize("thing", [thing for thing in THINGS if thing != "missing"])
def test_while_a_lease_is_damaged_no_gpu_counts_as_free(jobs, tmp_path, capsys, thing):
    assert status(capsys)[:3] == (0, 0, "ok")
    put(tmp_path / "home/leases/j-0000abcd.json", thing)
    code, free, state, err = status(capsys)
    assert (code, free, state) == (5, 0, "unknown")
    assert "j-0000abcd.json" in err


def test_a_lease_that_somebody_removed_still_counts(jobs, tmp_path, capsys):
    (tmp_path / "home/leases" / f"{jobs['job']}.json").unlink()
    assert status(capsys)[:3] == (0, 0, "ok")


def test_a_lease_of_another_inventory_counts_on_the_same_machine(jobs, tmp_path, capsys, monkeypatch):
    text = INVENTORY.replace("h1: {}", "other: {address: h1}")
    assert text != INVENTORY
    (tmp_path / "second.yaml").write_text(text)
    (tmp_path / "third.yaml").write_text(INVENTORY.replace("h1: {}", "h3: {}"))
    store = JobStore(tmp_path / "home")  # below: what `status --watch` shows
    second, third = (Cluster(load_inventory(tmp_path / f"{name}.yaml"), store.home) for name in ("second", "third"))
    cells = {host.name: host.cells for host in read_cluster(second, store).picture.hosts}
    assert cells["other"][:2] == (jobs["job"], jobs["job"])
    assert leased_hosts(read_cluster(second, store).picture) == ["other"]
    assert leased_hosts(read_cluster(third, store).picture) == []
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "second.yaml"))
    assert status(capsys)[:3] == (0, 0, "ok")
