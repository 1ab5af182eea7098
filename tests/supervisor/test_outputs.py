from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from power_hosts import PowerLinks, World

from gpurun.jobs.folder import JobFolder
from gpurun.launch.launchers.horovod import GLOO
from gpurun.state.paths import StatePath
from gpurun.supervisor.outputs import plan
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.outputs import collect_outputs, send_outputs

JOB = "j-00000001"


@pytest.fixture
def job(tmp_path):
    """A job on a host that has its third checkpoint; the head has the second."""
    world = World(tmp_path / "world")
    world.make(("h1",))
    world.save("h1", JOB, 3)
    folder = JobFolder(StatePath(tmp_path) / JOB)
    folder.outputs.mkdir(parents=True)
    (folder.outputs / "checkpoint").write_text("2")
    os.utime(folder.outputs / "checkpoint", ns=(2, 2))
    return SimpleNamespace(
        world=world, folder=folder, hosts=("h1",), links=PowerLinks(world, ("h1",)), outputs=HeadCopy(folder),
        lease=SimpleNamespace(job=JOB, attempt=1), spec=SimpleNamespace(
            outputs="/out", keeps_outputs=True, min_gpus=None, retry=None
        ),
        record=SimpleNamespace(outputs_left=None, reached="containers", outcome=None), launcher=GLOO,
    )  # fmt: skip


def kept(job):
    return (job.folder.outputs / "checkpoint").read_text()


def test_outputs_are_durable_before_the_hosts_are_removed(job, monkeypatch):
    steps = []
    monkeypatch.setattr("gpurun.supervisor.outputs.copy.sync_tree", lambda tree: steps.append(("tree", tree.name)))
    monkeypatch.setattr(
        "gpurun.supervisor.outputs.copy.durable.sync_folder", lambda folder: steps.append(("names", kept(job)))
    )
    remove = job.world.remove
    monkeypatch.setattr(job.world, "remove", lambda *args: (steps.append(("removed", kept(job))), remove(*args)))
    assert collect_outputs(job) == set()
    assert steps == [("tree", "outputs.arriving"), ("names", "3"), ("removed", "3")]
    assert job.world.things("h1") == []


def test_the_list_of_changes_is_on_the_disk_before_it_has_its_name(tmp_path, own_copy):
    """A power cut after the new name would otherwise leave a list that is empty or torn."""
    steps = []

    def rename(*names, **folders):
        steps.append("named")
        os.rename(*names, **folders)  # noqa: PTH104

    own_copy(plan, "os", fsync=lambda _: steps.append("synced"), rename=rename)
    folder = os.open(tmp_path, os.O_RDONLY)
    plan.write_changes(folder, [{"rm": "old"}])
    assert steps == ["synced", "named"]
    assert plan.read_changes(folder) == [{"rm": "old"}]
    os.close(folder)


@pytest.fixture
def crashed(job, monkeypatch):
    """The job, once the head was killed when everything had arrived and nothing of the copy was changed."""

    def crash(*_):
        raise SystemExit("killed")

    with monkeypatch.context() as killing:
        killing.setattr(HeadCopy, "_go_on", crash)
        with pytest.raises(SystemExit):
            collect_outputs(job)
    assert kept(job) == "2"
    job.outputs = HeadCopy(job.folder)
    return job


def test_changes_that_a_crash_interrupted_are_made(crashed):
    """The host with the newer ones was lost meanwhile."""
    crashed.world.remove("h1", "outputs-")
    send_outputs(crashed)
    assert kept(crashed) == "3"
    assert crashed.world.saved_step("h1", JOB) == 3


def test_a_crash_while_outputs_are_changed_costs_nothing(crashed):
    assert collect_outputs(crashed) == set()
    assert kept(crashed) == "3"
    assert not (crashed.folder.path / "outputs.arriving").exists()
