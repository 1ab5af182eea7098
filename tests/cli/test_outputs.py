"""`gpurun outputs`: what a job has left behind is found, brought and copied, whatever is in it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from local_agents import Hosts
from outputs_world import OutputsLinks

from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import OutputsLeft, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.state import durable
from gpurun.supervisor import links
from gpurun.supervisor.links import freeze
from gpurun.supervisor.outputs import plan

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


class Links(OutputsLinks):
    """To hosts of this machine; those that are off do not answer."""

    off = frozenset()
    world: Hosts

    def __init__(self, inventory, hosts):
        super().__init__(self.world.fleet(*hosts))
        self.targets, self.silent = dict.fromkeys(hosts), set(self.off)

    def open(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    made = Hosts(tmp_path)
    monkeypatch.setattr(links, "Links", Links)
    monkeypatch.setattr(Links, "world", made, raising=False)
    yield made
    made.close()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job that has ended; some of its outputs are on the head."""
    home = tmp_path / "home"
    monkeypatch.setenv("GPURUN_HOME", str(home))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    spec = JobSpec("n", "i", 1, ("true",), outputs="/out")
    folder = JobStore(home).create(spec, inventory=tmp_path / "inventory.yaml", now_s=0.0)
    folder.write(folder.record().but(attempt=1, state=State.FAILED, ended_s=1.0))
    folder.outputs.mkdir()
    (folder.outputs / "model").write_text("older")
    (folder.outputs / "latest").symlink_to("/etc/passwd")
    return folder


def left_on(job, hosts, tmp_path, *names):
    """Hosts that have kept something."""
    left = OutputsLeft(len(names), tuple(f"{name}: did not answer" for name in names), names)
    job.write(job.record().but(outputs_left=left))
    grants = tuple(Grant(name, (0,)) for name in names)
    lease = Lease(job.id, 1, "o", 0, "g", ("r1",), grants, 23022, 0.0, str(tmp_path / "inventory.yaml"))
    freeze(job, load_inventory(tmp_path / "inventory.yaml"), lease)
    for name in names:
        there = hosts.home(name) / ".gpurun/outputs" / job.id
        there.mkdir(parents=True)
        (there / f"of {name}").write_text("newest")


def test_they_are_where_it_says(job, gpurun):
    code, out, _ = gpurun("outputs", job.id)
    assert code == 0 and str(job.outputs) in out and "2 files" in out
    document = json.loads(gpurun("outputs", job.id, "--json")[1])
    assert document == {"job": job.id, "path": str(job.outputs), "files": 2, "bytes": 16, "left": None}


def test_what_hosts_have_kept_is_brought(job, gpurun, hosts, tmp_path):
    left_on(job, hosts, tmp_path, "h1", "h2")
    code, out, _ = gpurun("outputs", job.id, "--to", str(tmp_path / "mine"))
    assert code == 0 and "4 files" in out
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["latest", "model", "of h1", "of h2"]
    assert job.record().outputs_left is None
    assert not list(hosts.home("h1").glob(".gpurun/outputs/*"))


def test_who_asks_for_outputs_gets_more_than_the_limit_of_what_comes_by_itself(job, gpurun, hosts, tmp_path):
    durable.write_record(job.path / "spec.json", replace(job.spec(), outputs_limit_mib=0))
    left_on(job, hosts, tmp_path, "h1")
    code, out, _ = gpurun("outputs", job.id)
    assert code == 0 and "3 files" in out
    assert job.record().outputs_left is None


def test_nobody_gets_the_reserve_of_the_disk(job, gpurun, hosts, tmp_path, monkeypatch):
    left_on(job, hosts, tmp_path, "h1")
    monkeypatch.setattr(plan, "disk_of", lambda _: (1 << 30, 100 << 30))
    code, out, _ = gpurun("outputs", job.id)
    assert code == 4 and "'of h1' does not fit: the head keeps 5 GiB of its disk free" in out
    assert (hosts.home("h1") / ".gpurun/outputs" / job.id / "of h1").exists()
    assert (job.outputs / "model").exists()


def test_a_host_that_is_off_keeps_its_copy_and_is_named(job, gpurun, hosts, tmp_path, monkeypatch):
    left_on(job, hosts, tmp_path, "h1", "h2")
    monkeypatch.setattr(Links, "off", frozenset({"h2"}))
    code, out, _ = gpurun("outputs", job.id)
    assert code == 4 and "copies remain on h2" in out and "copies remain on h1" not in out
    assert (job.outputs / "of h1").exists()


def test_while_it_runs_hosts_are_left_in_peace(job, gpurun, hosts, tmp_path, monkeypatch):
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: ())  # it has no supervisor
    left_on(job, hosts, tmp_path, "h1")
    job.write(job.record().but(state=State.RUNNING, ended_s=None))
    code, out, _ = gpurun("outputs", job.id)
    assert code == 4 and "copies remain on h1" in out
    assert "fetches them" not in out, "not before the job has ended"
    assert "fetches them" not in gpurun("status", job.id)[1]
    assert hosts.processes == {}


def test_links_are_copied_as_links(job, gpurun, tmp_path):
    assert gpurun("outputs", job.id, "--to", str(tmp_path / "deep" / "mine"))[0] == 0
    assert str((tmp_path / "deep/mine/latest").readlink()) == "/etc/passwd"


def test_holes_stay_holes_and_the_rest_is_as_it_was(job, gpurun, tmp_path):
    sparse, far = job.outputs / "data.mdb", 3 << 30
    with sparse.open("wb") as file:
        for position in (4096, far):
            file.seek(position)
            file.write(b"pages")
        file.truncate(far + (1 << 20))
    sparse.chmod(0o640)
    os.utime(sparse, ns=(10**18, 10**18))
    (job.outputs / "empty").touch()
    assert gpurun("outputs", job.id, "--to", str(tmp_path / "mine"))[0] == 0
    copy = tmp_path / "mine" / "data.mdb"
    found, was = copy.stat(), sparse.stat()
    assert (found.st_size, found.st_mode, found.st_mtime_ns) == (was.st_size, was.st_mode, was.st_mtime_ns)
    assert found.st_blocks * 512 < 1 << 20, "3 GiB would be written"
    with copy.open("rb") as file:
        for position in (4096, far):
            file.seek(position)
            assert file.read(6) == b"pages\0"
    assert (tmp_path / "mine/model").read_text() == "older" and (tmp_path / "mine/empty").read_bytes() == b""


def test_a_folder_that_exists_gets_what_it_lacks(job, gpurun, tmp_path):
    """It was refused, so a person who fetched the outputs twice had two folders."""
    (job.outputs / "deep").mkdir()
    (job.outputs / "deep" / "step'; 1").write_text("one")
    there = tmp_path / "there"
    (there / "deep").mkdir(parents=True, mode=0o700)
    (there / "notes").write_text("mine")
    os.utime(there, ns=(10**18, 10**18))
    (tmp_path / "a link").symlink_to(there)
    assert gpurun("outputs", job.id, "--to", str(tmp_path / "a link"))[0] == 0
    assert (there / "notes").read_text() == "mine" and (there / "model").read_text() == "older"
    assert (there / "deep" / "step'; 1").read_text() == "one" and str((there / "latest").readlink()) == "/etc/passwd"
    assert (there / "deep").stat().st_mode & 0o777 == 0o700, "its own mode stays"
    os.utime(there / "model")
    (job.outputs / "step 2").write_text("two")
    assert gpurun("outputs", job.id, "--to", str(there))[0] == 0, "what is the same stays"
    assert (there / "step 2").read_text() == "two"


def put_a_file(there, outside):
    (there / "model").write_text("mine!")  # as long as the job's


def put_a_link(there, outside):
    (there / "deep").symlink_to(outside)


def put_a_folder(there, outside):
    (there / "latest").mkdir()


def put_a_link_to_the_same(there, outside):
    (outside / "model").write_text("older")
    (there / "model").symlink_to(outside / "model")


def put_a_pipe(there, outside):
    os.mkfifo(there / "model")


@pytest.mark.parametrize("put", [put_a_file, put_a_link, put_a_folder, put_a_link_to_the_same, put_a_pipe])
def test_nothing_is_written_over(job, gpurun, tmp_path, put):
    (job.outputs / "deep").mkdir()
    (job.outputs / "deep" / "new").write_text("new")
    there, outside = tmp_path / "there", tmp_path / "outside"
    there.mkdir()
    outside.mkdir()
    put(there, outside)
    before = {str(path) for path in (*there.rglob("*"), *outside.rglob("*"))}
    code, _, err = gpurun("outputs", job.id, "--to", str(there))
    assert code == 2 and "the folder already has different files with these names: " in err and str(there) in err
    assert {str(path) for path in (*there.rglob("*"), *outside.rglob("*"))} == before, "nothing is copied then"
    if put is put_a_file:
        assert (there / "model").read_text() == "mine!"


def test_a_file_is_no_folder_to_copy_into(job, gpurun, tmp_path):
    (tmp_path / "a file").write_text("kept")
    assert gpurun("outputs", job.id, "--to", str(tmp_path / "a file"))[0] == 2
    assert (tmp_path / "a file").read_text() == "kept"


def test_a_job_without_any_says_so(job, gpurun, tmp_path):
    for path in job.outputs.iterdir():
        path.unlink()
    job.outputs.rmdir()
    code, out, _ = gpurun("outputs", job.id)
    assert code == 0 and "has no outputs on the head" in out
    assert gpurun("outputs", job.id, "--to", str(tmp_path / "mine"))[0] == 2
    assert not (tmp_path / "mine").exists()


def test_names_that_are_no_text_move_no_cursor(job, gpurun):
    left = OutputsLeft(1, ("\x1b[2J is a pipe",))
    job.write(job.record().but(outputs_left=left))
    code, out, _ = gpurun("outputs", job.id)
    assert code == 0 and "\x1b" not in out


def test_outputs_that_are_a_link_are_not_followed(job, gpurun, tmp_path):
    """The job's owner can put one there, to have root copy other files."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    job.outputs.rename(tmp_path / "away")
    job.outputs.symlink_to(tmp_path / "private")
    code, _, err = gpurun("outputs", job.id, "--to", str(tmp_path / "mine"))
    assert (code, (tmp_path / "mine").exists()) == (5, False), err


def test_status_and_show_name_what_was_written_beside_the_code(gpurun, job):
    assert "beside" not in gpurun("status", job.id)[1]
    top = job.outputs / "@workspace"
    (top / "runs").mkdir(parents=True)
    (top / "snapshot.pt").write_text("s")
    (top / "runs" / "a\x1b[2J\nb").write_text("hostile")
    for command in ("status", "show"):
        said = gpurun(command, job.id)[1]
        assert "snapshot.pt" in said and f"in {top}" in said and "\x1b" not in said, said
    assert json.loads(gpurun("status", job.id, "--json")[1])["jobs"][0]["beside"] == [
        "snapshot.pt", "runs/a\x1b[2J\nb",
    ]  # fmt: skip
    for number in range(20):
        (top / f"t{number}").touch()
    assert "and 17 more, in" in gpurun("status", job.id)[1]
