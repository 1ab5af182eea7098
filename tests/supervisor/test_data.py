"""What a gang's hosts get of its data: from the head, from each other, and for a host that joins from a member."""

import errno
from types import SimpleNamespace

import pytest
from local_agents import Hosts
from outputs_world import outputs_job

from gpurun.content.data import FilesBlob, Pins, _SourceBlob, below
from gpurun.errors import HostUnreachable
from gpurun.inventory.model import Inventory
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import State
from gpurun.jobs.spec import DataSource
from gpurun.remote import Fleet
from gpurun.state import caches
from gpurun.state.paths import StatePath
from gpurun.supervisor import start
from gpurun.supervisor.job import SendingTold
from gpurun.supervisor.start import send_data
from gpurun.supervisor.verdict.causes import is_unstarted
from gpurun.supervisor.verdict.ends import GangEnd


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job on three hosts that reads the folder ``data``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "head-cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "head-config"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_bytes(b"x" * 1_000_000)
    (tmp_path / "jobs").mkdir()
    world = Hosts(tmp_path)
    job = outputs_job(tmp_path / "jobs", world, "h1", "h2", "h3")
    source = DataSource("folder", str(tmp_path / "data"))
    job.spec.data = {"a": Pins(tmp_path).pin([source])[source]}
    job.inventory, job.home, job.emitted = Inventory((), (), {}), tmp_path / "home", []
    job.events = SimpleNamespace(emit=lambda kind, **fields: job.emitted.append((kind, fields)))
    job.sending = SendingTold(JobFolder(StatePath(tmp_path) / "jobs"), 1, job.events)
    yield job
    world.close()


def send(job, *hosts, asked=False):
    job.members = tuple(host for host in job.hosts if host not in hosts) if len(hosts) == 1 else job.hosts
    send_data(job, hosts, cancelled=lambda: asked)


def there(job, host):
    (digest,) = (source.digest for source in job.spec.data.values())
    file = job.world.home(host) / ".gpurun/data" / digest[7:] / "tree/file"
    pin_of_job = job.world.home(host) / ".gpurun/jobs/j-00000001/data" / digest[7:]
    return file.exists() and pin_of_job.exists()


def test_a_host_that_joins_gets_the_data_from_a_member_not_from_the_head(job, monkeypatch):
    send(job, "h1", "h2")
    assert there(job, "h1") and there(job, "h2") and not there(job, "h3")
    read = []
    monkeypatch.setattr(_SourceBlob, "_read_at", lambda *_: read.append(1))
    send(job, "h3")
    assert there(job, "h3") and not read
    kind, last = job.emitted[-1]
    assert (kind, last["data"], last["host"], last["state"], last["bytes"]) == ("stage", "a", "h3", "done", 1_000_000)


def test_data_that_changed_since_the_submit_come_from_a_member(job, tmp_path):
    send(job, "h1", "h2")
    (tmp_path / "data/file").write_bytes(b"y")
    send(job, "h3")
    assert there(job, "h3")
    assert "the files have changed since the submit" in job.notes[0]


def test_data_that_are_gone_end_the_job_with_a_reason(job, tmp_path):
    (tmp_path / "data/file").write_bytes(b"y")
    with pytest.raises(GangEnd) as ended:
        send(job, "h1", "h2")
    assert "no host has a copy" in ended.value.end.reason


@pytest.mark.parametrize("where", ["before the copy", "during the copy"])
def test_data_whose_file_server_is_away_make_the_job_wait(job, monkeypatch, where):
    """The head's own file system: NFS that does not answer."""
    away = OSError(errno.ESTALE, "Stale file handle")

    def fail(*_):
        raise away

    if where == "before the copy":
        monkeypatch.setattr(below, "open_top", fail)
    else:
        monkeypatch.setattr(FilesBlob, "_read_at", fail)
    with pytest.raises(GangEnd) as ended:
        send(job, "h1", "h2")
    assert is_unstarted(State.PREPARING, ended.value.end), ended.value.end.reason
    assert "on the head" in ended.value.end.reason
    monkeypatch.undo()


def test_a_host_gives_the_data_while_the_heads_file_server_is_away(job, monkeypatch):
    send(job, "h1", "h2")
    monkeypatch.setattr(below, "open_top", lambda _: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
    send(job, "h3")
    assert there(job, "h3")


def test_data_that_only_a_host_has_which_is_off_make_the_job_wait(job, tmp_path, monkeypatch):
    (digest,) = (source.digest for source in job.spec.data.values())
    caches.note_sites(digest, has=["h9"])
    (tmp_path / "data/file").write_bytes(b"y")
    off = Fleet({}, {"h9": HostUnreachable("no route to host", host="h9")})
    monkeypatch.setattr(start, "reach", lambda *_: off)
    with pytest.raises(GangEnd, match="no route to host") as ended:
        send(job, "h1", "h2")
    end = ended.value.end
    assert is_unstarted(State.PREPARING, end)
    assert {host: error.kind for host, error in end.by_host.items()} == {"h9": "unreachable"}


def test_a_gang_that_is_to_give_way_stops_staging(job):
    with pytest.raises(GangEnd, match="cancelled"):
        send(job, "h1", "h2", asked=True)
    assert not there(job, "h1")


def test_a_folder_that_one_host_lacks(job, tmp_path):
    (tmp_path / "h1/set").mkdir()
    job.spec.data = {"here": DataSource("host", str(tmp_path / "h1/set")), "none": DataSource("host", "/no/such")}
    with pytest.raises(GangEnd) as ended:
        send(job, "h1", "h2")
    assert "'none' cannot be mounted: /no/such: No such file" in ended.value.end.reason
    del job.spec.data["none"]
    send(job, "h1", "h2")
