"""A host that was lost is back: what it alone has of a job's outputs comes to the head."""

from __future__ import annotations

import pytest
from local_agents import Hosts
from outputs_world import OutputsLinks

from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.supervisor.outputs.outputs import bring_late


@pytest.fixture
def lost(tmp_path):
    """A job that ended while its host did not answer; the host is back."""
    home, hosts = tmp_path / "state", Hosts(tmp_path)
    home.mkdir()
    folder = JobStore(home).create(
        JobSpec("n", "i", 1, ("true",), outputs="/out"), inventory=tmp_path / "inventory.yaml", now_s=0.0
    )
    left = OutputsLeft(1, ("h1: did not answer",), ("h1",))
    record = folder.record().but(attempt=1, state=State.FAILED, outputs_left=left, reason="h1 is lost")
    folder.write(record.but(reason=record.last_words()))
    folder.outputs.mkdir()
    (folder.outputs / "model").write_text("older")
    (folder.outputs / "log").write_text("on the head alone")
    there = hosts.home("h1") / ".gpurun/outputs" / folder.id
    there.mkdir(parents=True)
    (there / "model").write_text("newest")
    lease = Lease(folder.id, 1, "o", 0, "g", ("r1",), (Grant("h1", (0,)),), 23022, 0.0, "/inventory.yaml", lost=True)
    yield home, lease, OutputsLinks(hosts.fleet("h1")), folder, there
    hosts.close()


def files(folder):
    return {path.name: path.read_text() for path in folder.outputs.iterdir()}


def test_it_is_brought_once_the_host_is_back(lost):
    home, lease, links, folder, there = lost
    assert f"copies remain on h1, and `gpurun outputs {folder.id}` fetches them" in folder.record().reason
    bring_late(home, lease, links, ["h1"])
    assert files(folder) == {"model": "newest", "log": "on the head alone"}
    assert (folder.record().outputs_left, folder.record().reason) == (None, "h1 is lost")
    assert not there.exists()


def test_what_a_later_attempt_has_written_is_not_replaced(lost):
    home, lease, links, folder, there = lost
    folder.write(folder.record().but(attempt=2))
    bring_late(home, lease, links, ["h1"])
    assert files(folder)["model"] == "older" and there.exists()


def test_a_host_that_fails_again_keeps_its_copy(lost):
    home, lease, links, folder, there = lost
    links.silent = {"h1"}
    bring_late(home, lease, links, ["h1"])
    assert folder.record().outputs_left.hosts == ("h1",) and there.exists()
    assert files(folder)["model"] == "older"
