"""Containers share a host's cores while they are several, and the one that fills Docker's disk is ended."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_stand_in import EngineStandIn

from gpurun.node import docker
from gpurun.node.agent.frames import Call
from gpurun.node.job import caches, parts
from gpurun.node.job import watch as container_watch
from gpurun.node.job import watch as neighbours
from gpurun.node.job.watch import ContainerWatch, Counted, Neighbours, settle

JOB, OTHER = "j-0a1b2c3d", "j-0000000e"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    made = EngineStandIn(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{made.path}")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield made
    made.shutdown()
    made.server_close()


def call():
    return Call(1, lambda *_: None, False, b"")


def quota(engine, ident):
    return engine.containers[ident]["HostConfig"]["CpuQuota"]


def job(name, cpus="2.50"):
    return {"gpurun.job": name, "gpurun.cpus": cpus}


def test_a_container_has_its_share_while_another_is_there_and_all_cores_before_and_after(engine):
    watch, mine = Neighbours(), engine.run(job(JOB))
    watch.look(call())
    assert quota(engine, mine) == 0 and engine.changes == [], "alone: nothing to do"
    other = engine.run(job(OTHER, "0.50"))
    watch.look(call())
    assert (quota(engine, mine), quota(engine, other)) == (250_000, 50_000)
    changes = len(engine.changes)
    watch.look(call())
    assert len(engine.changes) == changes, "nobody has come or gone"
    engine.remove(other)
    watch.look(call())
    assert quota(engine, mine) == -1


def test_a_new_agent_corrects_what_another_one_left(engine):
    mine = engine.run(job(JOB))
    engine.containers[mine]["HostConfig"] = {"CpuQuota": 50_000}
    Neighbours().look(call())
    assert quota(engine, mine) == -1


def test_servers_on_a_host_without_gpus_divide_its_cores_by_those_that_run(engine):
    watch, idents = Neighbours(), [engine.run(job(JOB, "3.00/n"))]
    watch.look(call())
    assert quota(engine, idents[0]) == 0, "alone"
    for number, each in ((1, 150_000), (2, 100_000), (3, 100_000)):
        idents.append(engine.run(job(f"j-0000000{number}", "3.00/n")))
        watch.look(call())
        assert {quota(engine, ident) for ident in idents} == {each}, "one core at least"


def test_a_quota_that_was_refused_is_set_at_the_next_look(engine):
    watch, mine, other = Neighbours(), engine.run(job(JOB)), engine.run(job(OTHER, "0.50"))
    engine.refusals = 1
    watch.look(call())
    assert (quota(engine, mine), quota(engine, other)) == (0, 50_000), "one refusal is not another container's"
    watch.look(call())
    assert quota(engine, mine) == 250_000


def test_a_quota_that_another_agent_left_late_is_corrected_after_a_while(engine):
    watch, mine = Neighbours(), engine.run(job(JOB))
    watch.look(call())
    engine.containers[mine]["HostConfig"] = {"CpuQuota": 50_000}
    for _ in range(neighbours.CHECK_EVERY):
        watch.look(call())
    assert quota(engine, mine) == -1


def test_an_engine_that_can_set_no_quota_is_asked_less_and_less(engine):
    watch, mine, _ = Neighbours(), engine.run(job(JOB)), engine.run(job(OTHER))
    engine.refusals = 1000
    for _ in range(neighbours.CHECK_EVERY - 1):
        watch.look(call())
    assert 1000 - engine.refusals == 2 * neighbours.MOST_REFUSALS
    engine.refusals = 0
    watch.look(call())
    assert quota(engine, mine) == 250_000


def test_who_comes_while_quotas_are_set_gets_one_too(engine, monkeypatch):
    mine, other = engine.run(job(JOB)), engine.run(job(OTHER))
    set_quota, late = neighbours._set_quota, []

    def slow(connection, container, quota_us):
        if not late:
            late.append(engine.run(job("j-0000000f", "1.00")))
            engine.remove(other)
        set_quota(connection, container, quota_us)

    monkeypatch.setattr(neighbours, "_set_quota", slow)
    connection = docker.open_engine(call())
    assert settle(connection) == {mine, *late}
    connection.close()
    assert [quota(engine, each) for each in (mine, *late)] == [250_000, 100_000]


@pytest.mark.parametrize("cpus", ["", "x", "nan", "inf", "-1", "0", "1e300", "9" * 400, "/n", "x/n", "nan/n"])
def test_a_label_that_is_no_number_of_cores_limits_nothing(engine, cpus):
    mine, other = engine.run(job(JOB, cpus)), engine.run({"gpurun.job": OTHER})
    Neighbours().look(call())
    assert quota(engine, mine) == quota(engine, other) == 0


def test_without_docker_the_weights_remain(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    Neighbours().look(call())


# -- the disk ----------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk of 1 TiB that has all of the job's files; its `free` may be changed."""
    made = SimpleNamespace(free=1 << 39)
    monkeypatch.setattr(container_watch, "_room", lambda _: container_watch._Room(1, made.free, 2 << 30))
    return made


def look(watch):
    watch._sizes_s = 0.0
    return watch.disk(call(), [("Docker's disk", "/var/lib/docker"), ("the outputs' disk", "/home")])


def test_the_container_that_has_written_the_most_is_ended_and_no_other(engine, disk):
    mine, theirs = ContainerWatch(JOB), ContainerWatch(OTHER)
    filler = engine.run(job(JOB), written=1 << 20)
    neighbour = engine.run(job(OTHER), written=3 << 30)
    assert look(mine) == look(theirs) == [], "there is room"
    disk.free = 1 << 30
    engine.containers[filler]["SizeRw"] = 500 << 30
    assert look(theirs) == [] and engine.changes == []
    what, path = "Docker's disk", "/var/lib/docker"
    told = {"kind": "filled", "what": what, "path": path, "free_bytes": 1 << 30, "written_bytes": 500 << 30}
    assert look(mine) == [told]
    assert engine.changes == [(filler, "kill")] and neighbour in engine.containers
    assert look(mine) == [], "told once"


def test_the_largest_is_not_ended_for_a_disk_that_somebody_else_fills(engine, disk):
    watch, mine = ContainerWatch(JOB), engine.run(job(JOB), written=300 << 30)
    assert look(watch) == []
    disk.free = 1 << 30
    assert look(watch) == [], "somebody copied data there; this job has written nothing since the first look"
    disk.free, engine.containers[mine]["SizeRw"] = 0, (300 << 30) + (1 << 20)
    assert look(watch) == [], "nor has it filled the rest with a line of its log"
    engine.containers[mine]["SizeRw"] += 1 << 20
    assert [item["kind"] for item in look(watch)] == ["filled"], "only this job still writes"


def test_who_has_filled_a_disk_before_the_first_look_is_not_known(engine, disk):
    disk.free, watch = 0, ContainerWatch(JOB)
    engine.run(job(JOB), written=500 << 30)
    assert look(watch) == look(watch) == []


def test_while_there_is_room_docker_is_seldom_asked(engine, disk, monkeypatch):
    layers, asked = container_watch._layers, []
    monkeypatch.setattr(container_watch, "_layers", lambda call: asked.append(1) or layers(call))
    watch = ContainerWatch(JOB)
    engine.run(job(JOB))
    for _ in range(20):
        assert look(watch) == []
    assert len(asked) == 1, "once for each disk that the job writes to; here it is one"


def test_the_job_whose_outputs_take_what_the_disk_loses_is_ended(engine, disk, monkeypatch):
    files = {JOB: 5 << 30, OTHER: 50 << 30}
    monkeypatch.setattr(ContainerWatch, "_files_on", lambda self, _: files[self._job])
    mine, theirs = ContainerWatch(JOB), ContainerWatch(OTHER)
    engine.run(job(JOB))
    engine.run(job(OTHER), written=1 << 20)
    disk.free = 1 << 30
    assert look(mine) == look(theirs) == [], "nobody knows yet who writes"
    disk.free -= 300 << 20
    files[JOB] += 280 << 20
    files[OTHER] += 20 << 20
    assert look(theirs) == []
    assert [item["written_bytes"] for item in look(mine)] == [files[JOB]]


def test_of_two_jobs_that_share_caches_one_is_ended_for_what_they_grow(engine, disk, monkeypatch):
    """Each alone has written little: the caches tell not who has written them."""
    owner = f"{'a' * 16}-1000"
    for number, name in enumerate((JOB, OTHER)):
        Path(parts.job_folder(name)).mkdir(parents=True)
        caches.join(call(), name, owner, 1 << 60)
        os.utime(Path(parts.job_folder(name), caches.USE_FILE), (number, number))
    grown = {caches.caches_folder(owner): 5 << 30}
    monkeypatch.setattr(container_watch, "_bytes_on", lambda _, folder: grown.get(folder, 0))
    older, newer = ContainerWatch(JOB), ContainerWatch(OTHER)
    engine.run(job(JOB))
    newest = engine.run(job(OTHER))
    disk.free = 1 << 30
    assert look(older) == look(newer) == []
    disk.free, grown[caches.caches_folder(owner)] = 700 << 20, (5 << 30) + (300 << 20)
    assert look(older) == []
    assert [item["kind"] for item in look(newer)] == ["filled"]
    assert engine.changes == [(newest, "kill")]
    Path(parts.job_folder(OTHER), caches.USE_FILE).unlink()
    assert look(older) == [], "what the caches were before is not what the other one has written"
    disk.free, grown[caches.caches_folder(owner)] = 400 << 20, (5 << 30) + (600 << 20)
    assert [item["kind"] for item in look(older)] == ["filled"]


def test_a_disk_that_something_else_fills_ends_nobody(engine, disk, monkeypatch):
    monkeypatch.setattr(ContainerWatch, "_files_on", lambda *_: 3 << 30)
    watch = ContainerWatch(JOB)
    engine.run(job(JOB), written=1 << 30)
    for free in (1 << 30, 1 << 29, 0, 0):
        disk.free = free
        assert look(watch) == [] and engine.changes == []


def test_files_of_a_job_count_on_their_own_device(engine):
    watch, folder = ContainerWatch(JOB), Path(parts.outputs_folder(JOB))
    folder.mkdir(parents=True)
    (folder / "deep").mkdir()
    (folder / "deep/checkpoint").write_bytes(b"x" * (1 << 20))
    (folder / "link").symlink_to("/")
    device = folder.stat().st_dev
    assert 1 << 20 <= watch._files_on(device) < 2 << 20
    assert watch._files_on(device + 1) == 0


def test_a_disk_that_cannot_be_asked_ends_nobody(engine):
    engine.run(job(JOB), written=1 << 60)
    assert ContainerWatch(JOB).disk(call(), [("Docker's disk", "/nonexistent")]) == []


# -- memory and processes ----------------------------------------------------------------------------------


def test_kills_are_told_once_also_after_the_container_has_gone(engine):
    watch, folder = ContainerWatch(JOB), Path(parts.job_folder(JOB))
    assert watch.counts() == []
    copies = folder / "run/cgroup.3"
    copies.mkdir(parents=True)
    (folder / "attempt").write_text("3")
    for name, text in {
        "memory.events": "oom 1\noom_kill 1\n", "memory.max": "1048576", "memory.peak": "1048576",
        "pids.events": "max 9", "pids.max": "64",
    }.items():  # fmt: skip
        (copies / name).write_text(text)
    assert watch.counts() == [
        {"kind": "memory", "kills": 1, "limit_bytes": 1 << 20, "peak_bytes": 1 << 20, "is_own_limit": True},
        {"kind": "pids", "refused": 9, "most": 64},
    ]
    assert watch.counts() == []
    (copies / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert [item["is_own_limit"] for item in watch.counts()] == [False], "the host's memory ran out, later"
    (copies / "memory.events").write_text("oom 2\noom_kill 2\n")
    assert watch.counts() == []
    (copies / "memory.events").write_text("oom 2\noom_kill 3\n")
    assert [item["is_own_limit"] for item in watch.counts()] == [True], "the limit is counted a moment before the kill"


def test_each_kill_under_cgroup_v1_is_judged_by_its_peak(monkeypatch):
    """v1 does not count how often a limit was reached."""
    watch = ContainerWatch(JOB)
    for kills in (1, 2):
        own = Counted(1 << 30, 1 << 30, kills, is_own_limit=True, refused=0, most_processes=None)
        monkeypatch.setattr(watch, "counted", lambda own=own: own)
        assert [item["is_own_limit"] for item in watch.counts()] == [True]
