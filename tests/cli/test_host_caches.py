"""``gpurun du --caches`` and ``gpurun prune --caches``, with agents as child processes."""

from __future__ import annotations

import json
import os

import pytest
from local_agents import Hosts
from lying_host import agent_of, done

from gpurun.node.job import caches
from gpurun.remote import Fleet
from gpurun.state.sharing import StateDirectory

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 1, fabric: f, cache_quota_mib: 1}
fabrics: {f: {kind: tcp, interface: lo}}
racks: {r1: {hosts: {h1: {}, h2: {}}}}
"""
KIB = 1 << 10


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Two hosts; the first has two models, more than the limit."""
    for name in ("GPURUN_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "i.yaml"))
    (tmp_path / "i.yaml").write_text(INVENTORY)
    hosts = Hosts(tmp_path)
    monkeypatch.setattr("gpurun.cli.disk.fleet_of", lambda _, names: hosts.fleet(*names))
    owner = f"{StateDirectory(tmp_path / 'GPURUN_HOME').id()}-{os.getuid()}"
    for at, name in enumerate(("old", "young"), 1):
        (tmp_path / "h1/.gpurun/caches" / owner / "gone").mkdir(parents=True, exist_ok=True)
        model = tmp_path / "h1/.gpurun/caches" / owner / "files/huggingface/hub" / name
        model.mkdir(parents=True)
        (model / "x").write_bytes(os.urandom(700 * KIB))
        os.utime(model / "x", (at, at))
    yield tmp_path
    hosts.close()


def models(world):
    return sorted(each.name for each in world.glob("h1/.gpurun/caches/*/files/huggingface/hub/*"))


def test_caches_are_seen_and_shrink_to_the_limit(gpurun, world):
    code, out, err = gpurun("du", "--caches", "--json")
    assert code == 0, err
    first, second = json.loads(out)["caches"]
    assert (first["host"], second["host"], second["bytes"]) == ("h1", "h2", 0)
    assert 1400 * KIB <= first["bytes"] < 1500 * KIB
    assert "h1" in gpurun("du", "--caches", "--host", "h1")[1]

    assert "and may use 1.0 MiB" in gpurun("prune", "--caches", "--dry-run")[1]
    assert models(world) == ["old", "young"]
    assert gpurun("prune", "--caches")[0] != 0  # stdin is not a terminal
    code, out, err = gpurun("prune", "--caches", "--yes", "--json")
    assert code == 0, err
    (told,) = json.loads(out)["caches"]
    assert 700 * KIB <= told["freed_bytes"] < 750 * KIB
    assert models(world) == ["young"]
    assert "nothing to remove" in gpurun("prune", "--caches", "--yes")[1]
    assert gpurun("prune", "--caches", "--keep-below", "1MiB", "--host", "h2", "--yes")[0] == 0
    assert models(world) == ["young"]


def test_a_job_that_uses_them_keeps_them_and_is_named(gpurun, world):
    owner = next((world / "h1/.gpurun/caches").iterdir()).name
    job = world / "h1/.gpurun/jobs/j-00000001"
    job.mkdir(parents=True)
    (job / caches.USE_FILE).write_text(owner)
    code, _, err = gpurun("prune", "--caches", "--yes")
    assert code == 0
    assert "gpurun keeps the caches on h1, because jobs use them: j-00000001" in err
    assert models(world) == ["old", "young"]


def test_what_names_jobs_is_refused(gpurun, world):
    assert gpurun("du", "--caches", "j-00000001")[0] == 2
    assert gpurun("prune", "--caches", "--state", "FAILED", "--yes")[0] == 2
    assert models(world) == ["old", "young"]


def test_a_host_that_lies_fails_alone_and_steers_no_terminal(gpurun, world, monkeypatch):
    lies = {"bytes": -1, "entries": 0, "jobs": ["\x1b[2J"]}
    with agent_of(done(lies), "h1") as liar:
        monkeypatch.setattr("gpurun.cli.disk.fleet_of", lambda *_: Fleet({"h1": liar}, {}))
        code, out, err = gpurun("du", "--caches", "--host", "h1")
    assert code == 4
    assert "\x1b" not in out + err
