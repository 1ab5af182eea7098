"""``gpurun data list | stage | evict``, and ``rerun`` of a job whose data are gone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from local_agents import Hosts
from lying_host import agent_of, done

from gpurun.content.data import Pins
from gpurun.jobs.record import State
from gpurun.jobs.spec import DataSource, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.remote import Fleet, answers
from gpurun.state import caches

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 1, fabric: f}
fabrics: {f: {kind: tcp, interface: lo}}
racks: {r1: {hosts: {"h[1-3]": {fabric_address: "127.0.0.[1-3]"}}}}
"""
NAME = "a'; echo \"ünï  data"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Three hosts, a folder with a hostile name, and nobody who would start what is queued."""
    for name in ("GPURUN_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "i.yaml"))
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: None)
    (tmp_path / "i.yaml").write_text(INVENTORY)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "file").write_bytes(b"x" * 1_000_000)
    hosts = Hosts(tmp_path)
    monkeypatch.setattr("gpurun.cli.content.fleet_of", lambda _, names: hosts.fleet(*names))
    yield tmp_path
    hosts.close()


def test_stage_list_and_evict(gpurun, world, monkeypatch):
    monkeypatch.chdir(world)
    code, out, err = gpurun("data", "stage", f"./{NAME}", "h[1-2]", "--json")
    assert code == 0, err
    staged = json.loads(out)
    assert [(each["host"], each["state"], each["bytes_received"]) for each in staged["hosts"]] == [
        ("h1", "done", 1_000_000), ("h2", "done", 1_000_000),
    ]  # fmt: skip
    assert "h[1-2]: already present" in gpurun("data", "stage", NAME, "h[1-2]")[1]

    code, out, _ = gpurun("data", "list", "--json")
    (listed,) = json.loads(out)["sets"]
    assert code == 0
    assert (listed["digest"], listed["hosts"], listed["bytes"]) == (staged["digest"], ["h1", "h2"], 1_000_000)
    assert listed["source"] == str(world / NAME)
    out = gpurun("data", "list")[1]
    assert "h[1-2]" in out and "unused for" in out and len(out.splitlines()) == 1

    assert gpurun("data", "evict")[0] == 2
    assert "is not the digest of a data set" in gpurun("data", "evict", "beef", "--yes")[2]
    code, _, err = gpurun("data", "evict", staged["digest"][:14])
    assert (code, "--yes" in err) == (2, True)
    code, out, _ = gpurun("data", "evict", "--unused", "--host", "h1", "--yes", "--json")
    assert json.loads(out) == {"evicted": {staged["digest"]: ["h1"]}, "kept": {}, "failed": {}}
    assert caches.hosts_of(staged["digest"]) == {"h2"}
    assert "removed from h2" in gpurun("data", "evict", staged["digest"][7:14], "--yes")[1]
    assert "nothing to remove" in gpurun("data", "evict", "--unused", "--yes")[1]
    assert "has put no data" in gpurun("data", "list")[1]


DIGEST = "sha256:" + "1" * 64
SET = {"digest": DIGEST, "bytes": 5, "files": 1, "used_s": 1.0, "jobs": []}
LIES = [
    None, [], {}, {"sets": None}, {"sets": [None]}, {"sets": [{}]}, {"sets": [{**SET, "digest": "sha256:x"}]},
    {"sets": [{**SET, "used_s": float("nan")}]}, {"sets": [{**SET, "used_s": None}]}, {"sets": [{**SET, "bytes": -1}]},
    {"sets": [{**SET, "jobs": ["\u001b[2J"]}]}, {"sets": [{**SET, "jobs": {}}]}, {"sets": [SET, SET]},
    {"sets": [{**SET, "digest": f"sha256:{number:064x}"} for number in range(answers.MOST_SETS + 1)]},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_a_host_that_lies_about_its_sets_is_named_and_left_out(gpurun, world, monkeypatch, lie):
    with agent_of(done({"sets": [SET]}), "h1") as honest, agent_of(done(lie), "h2") as liar:
        fleet = nullcontext(Fleet({"h1": honest, "h2": liar}, {}))
        monkeypatch.setattr("gpurun.cli.content.fleet_of", lambda *_: fleet)
        code, out, err = gpurun("data", "list", "h[1-2]")
        assert code == 4 and len(out.splitlines()) == 1 and " h1 " in out
        assert err.startswith("gpurun: h2: the host's answer is not valid: ")
        code, out, _ = gpurun("data", "list", "h[1-2]", "--json")
        assert code == 4 and [(one["hosts"], list(json.loads(out)["failed"])) for one in json.loads(out)["sets"]] == [
            (["h1"], ["h2"])
        ]
    assert caches.known().keys() == {DIGEST} and caches.hosts_of(DIGEST) == {"h1"}


def test_as_many_sets_as_a_host_may_have_are_noted_at_once(gpurun, world, monkeypatch):
    """A host that invents sets must not keep the head busy with its cache, nor push out of it what others have said."""
    written = []
    keep = caches.keep_cache
    monkeypatch.setattr(caches, "keep_cache", lambda path, payload: written.append(path) or keep(path, payload))
    caches.note_sites("sha256:" + "f" * 64, has=["h3"], source="/mine")
    many = [{**SET, "digest": f"sha256:{number:064x}"} for number in range(answers.MOST_SETS)]
    with agent_of(done({"sets": many}), "h1") as agent:
        fleet = nullcontext(Fleet({"h1": agent}, {}))
        monkeypatch.setattr("gpurun.cli.content.fleet_of", lambda *_: fleet)
        written.clear()
        code, out, _ = gpurun("data", "list", "h1")
    assert code == 0 and len(out.splitlines()) == len(many) and len(written) == 1
    assert caches.hosts_of("sha256:" + "f" * 64) == {"h3"}


def test_sets_are_listed_although_the_cache_cannot_be_written(gpurun, world, monkeypatch):
    (world / "XDG_CACHE_HOME").write_text("no folder")
    with agent_of(done({"sets": [SET]}), "h1") as agent:
        fleet = nullcontext(Fleet({"h1": agent}, {}))
        monkeypatch.setattr("gpurun.cli.content.fleet_of", lambda *_: fleet)
        code, out, err = gpurun("data", "list", "h1")
    assert (code, err) == (0, "") and DIGEST[7:19] in out


@pytest.mark.parametrize("source", ["host:/etc", "./none", "no-job:outputs", "", "a\nb:outputs/.."])
def test_what_cannot_be_staged(gpurun, world, source):
    code, _, err = gpurun("data", "stage", source)
    assert code == 2
    assert err.startswith("gpurun: ")


@pytest.fixture
def job(world):
    """A queued job that reads the folder."""
    source = DataSource("folder", str(world / NAME))
    data = {"a": Pins(world / "GPURUN_HOME").pin([source])[source]}
    spec = JobSpec("n", "i:1", 1, ("train",), image_id="sha256:" + "a" * 64, data=data)
    (folder,) = JobStore(world / "GPURUN_HOME").create_many([spec], inventory=world / "i.yaml", now_s=1.0)
    return folder


def test_data_of_a_job_that_waits_are_not_removed(gpurun, world, job):
    digest = job.spec().data["a"].digest
    gpurun("data", "stage", str(world / NAME), "h1")
    code, _, err = gpurun("data", "evict", digest, "--yes")
    assert code == 2
    assert f"needed by {job.id}" in err
    assert "nothing to remove" in gpurun("data", "evict", "--unused", "--yes")[1]


def test_rerun_says_that_data_are_gone(gpurun, world, job, monkeypatch):
    monkeypatch.setattr("gpurun.content.images.Engine.image", lambda *_: None)
    job.write(replace_state(job))
    assert job.spec().data["a"].digest in gpurun("show", job.id)[1]
    (world / NAME / "file").write_bytes(b"y")
    code, _, err = gpurun("rerun", job.id)
    assert code == 2
    assert "gpurun knows no host with a copy" in err


def test_diff_shows_data(gpurun, world, job):
    spec = job.spec()
    other = replace(spec, data={"a": replace(spec.data["a"], digest="sha256:" + "b" * 64)})
    (second,) = JobStore(world / "GPURUN_HOME").create_many([other], inventory=world / "i.yaml", now_s=2.0)
    differs = json.loads(gpurun("diff", job.id, second.id, "--json")[1])["differs"]
    assert differs == {"data.a.digest": [spec.data["a"].digest, "sha256:" + "b" * 64]}


def replace_state(job):
    return job.record().but(state=State.FAILED, ended_s=2.0)
