"""Code on hosts is the code on the head: every byte, mode and link, and only what changed travels."""

import os
import stat
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.content import tree, workdir
from gpurun.content.tree import scan
from gpurun.content.workdir import DIRECT_BYTES, Code, write_code
from gpurun.errors import BadInput
from gpurun.inventory.read import load_inventory
from gpurun.remote import RemoteOpFailed
from gpurun.state.paths import StatePath
from gpurun.supervisor import start

sync_workdir = partial(workdir.sync_workdir, inventory=None)
INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 1, fabric: f}
fabrics: {f: {kind: tcp, interface: lo, %s}}
racks:
  r1: {hosts: {h0: {fabric_address: 127.0.0.1}, h2: {fabric_address: 127.0.0.1}}}
  r2: {hosts: {h1: {fabric_address: 127.0.0.1}}}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "head-cache"))


@pytest.fixture
def work(tmp_path):
    top = tmp_path / "work"
    (top / "pkg/empty").mkdir(parents=True)
    (top / "train.py").write_text("print('hi')\n")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "pkg/data.bin").write_bytes(os.urandom(300_000))
    (top / "pkg" / "a b'\"\n$(x) ünï").write_text("hostile name")
    (top / os.fsdecode(b"caf\xe9")).write_text("no utf-8")
    (top / "same").write_text("print('hi')\n")
    (top / "zero").touch()
    (top / "link").symlink_to("pkg/data.bin")
    (top / "out").symlink_to("/data/shared")
    (top / "dangling").symlink_to("nowhere")
    (top / "ro").mkdir()
    (top / "ro/file").write_text("x")
    (top / "ro/file").chmod(0o444)
    (top / "ro").chmod(0o555)
    (top / ".gitignore").write_text("*.pyc\n")
    (top / "old.pyc").write_text("left out")
    os.mkfifo(top / "pipe")
    yield top
    (top / "ro").chmod(0o755)


def shape(top: Path):
    """Everything about a folder that must be the same."""
    found = {}
    for folder, names, files in os.walk(top):
        for name in [*names, *files]:
            path = Path(folder) / name
            status = path.lstat()
            content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            mode = 0 if path.is_symlink() else stat.S_IMODE(status.st_mode)
            mtime = 0 if path.is_symlink() else status.st_mtime_ns
            found[str(path.relative_to(top))] = (stat.S_IFMT(status.st_mode), mode, mtime, content)
    return found


def wanted(top: Path):
    return {name: what for name, what in shape_without_fifo(top).items() if name != "old.pyc"}


def shape_without_fifo(top):
    (top / "pipe").unlink(missing_ok=True)
    return shape(top)


def as_it_is(work, _folder):
    return scan(work)


def as_a_job_keeps_it(work, folder):
    write_code(StatePath(folder) / "code", scan(work))
    return Code(StatePath(folder) / "code")


@pytest.mark.parametrize("read", [as_it_is, as_a_job_keeps_it])
def test_the_same_on_every_host(hosts, work, tmp_path, read):
    fleet = hosts.fleet("h0", "h1")
    folders = {name: f"{tmp_path}/{name}/job 'x'/workspace" for name in ("h0", "h1")}
    results = sync_workdir(fleet, folders, read(work, tmp_path))
    assert not results.failed and set(results.ok) == {"h0", "h1"}
    for folder in folders.values():
        assert shape(Path(folder)) == wanted(work)


def test_a_large_folder_tells_how_far_it_is_and_a_small_one_tells_nothing(hosts, work, tmp_path):
    fleet, told = hosts.fleet("h0"), []
    send = partial(sync_workdir, fleet, told=lambda *event: told.append(event))
    send({"h0": f"{tmp_path}/h0/job1"}, scan(work))
    assert told == []
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 5))
    send({"h0": f"{tmp_path}/h0/job2"}, scan(work))
    assert told[-1] == ("h0", DIRECT_BYTES + 5, DIRECT_BYTES + 5)
    assert len(told) > 1 and told == sorted(told)


def test_only_what_changed_is_sent(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    first = sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job1"}, scan(work)).ok["h0"]
    assert first > 300_000
    assert sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job2"}, scan(work)).ok["h0"] == 0
    (work / "train.py").write_text("print('changed')\n")
    (work / "pkg/data.bin").rename(work / "pkg/moved.bin")
    assert sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job1"}, scan(work)).ok["h0"] == len("print('changed')\n")
    assert shape(tmp_path / "h0/job1") == wanted(work)


def test_what_is_not_in_it_any_more_goes_and_kinds_may_change(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    target = tmp_path / "h0/job"
    sync_workdir(fleet, {"h0": str(target)}, scan(work))
    (target / "ro").chmod(0o755)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    (target / "extra").mkdir()
    (target / "extra/deep").symlink_to(outside)
    (target / "train.py").write_text("tampered!!!\n")
    (target / "zero").unlink()
    (target / "zero").mkdir()
    (target / "pkg/empty").rmdir()
    (target / "pkg/empty").symlink_to(outside)
    (target / "run.sh").unlink()
    (target / "run.sh").symlink_to(outside / "precious")
    os.link(target / "same", outside / "hard")
    sync_workdir(fleet, {"h0": str(target)}, scan(work))
    assert shape(target) == wanted(work)
    assert (outside / "precious").read_text() == "kept"
    assert (target / "same").stat().st_nlink == 1


def test_large_folders_go_through_a_chain(hosts, work, tmp_path):
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    names = ["h0", "h1", "h2"]
    fleet = hosts.fleet(*names)
    folders = {name: f"{tmp_path}/{name}/job" for name in names}
    results = sync_workdir(fleet, folders, scan(work))
    assert not results.failed
    for name in names:
        assert shape(Path(folders[name])) == wanted(work)
        assert list(hosts.spool(name).iterdir()) == []


@pytest.fixture
def relays(monkeypatch):
    """Every transfer's chains and options."""
    made = []

    def relay(fleet, chains, options, told):
        made.append(SimpleNamespace(chains=chains, options=options))
        return Relay(fleet, chains, options, told)

    Relay = workdir.Relay
    monkeypatch.setattr(workdir, "Relay", relay)
    return made


@pytest.mark.parametrize(
    ("fabric", "ways"),
    [
        ("host_to_host: true", [[("h0", None), ("h2", "h0"), ("h1", "h2")]]),
        ("host_to_host: false", [[("h0", None), ("h1", None), ("h2", None)]]),
        ("chains: 2", [[("h0", None), ("h2", "h0"), ("h1", "h2")], [("h2", None), ("h0", "h2"), ("h1", "h0")]]),
    ],
)
def test_a_jobs_code_goes_the_ways_that_its_inventory_knows(hosts, work, tmp_path, relays, fabric, ways):
    """Rack after rack, on the fabric, over as many chains as it carries; but only between hosts that may talk."""
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    (tmp_path / "inventory.yaml").write_text(INVENTORY % fabric)
    names, events = ("h0", "h1", "h2"), []
    places = {name: SimpleNamespace(job_folder=lambda _job, name=name: f"{tmp_path}/{name}/job") for name in names}
    job = SimpleNamespace(
        spec=SimpleNamespace(workdir=str(work), code=""), accounts=places, lease=SimpleNamespace(job="j"),
        links=SimpleNamespace(fleet=hosts.fleet(*names)), inventory=load_inventory(tmp_path / "inventory.yaml"),
        sending=SimpleNamespace(told=lambda kind, event: events.append((kind, event))),
    )  # fmt: skip
    start._send_workdir(job, names)
    ends = {event.host: event for kind, event in events if kind == "workdir"}
    assert {host: event.state for host, event in ends.items()} == dict.fromkeys(names, "done")
    assert all(event.bytes == event.total > DIRECT_BYTES for event in ends.values())
    (relay,) = relays
    assert [[(hop.host, hop.upstream) for hop in hops] for hops in relay.chains] == ways
    assert relay.options.addresses == dict.fromkeys(names, "127.0.0.1") and set(relay.options.interfaces) == set(names)
    for name in names:
        assert shape(tmp_path / name / "job/workspace") == wanted(work)


def test_a_changed_copy_in_the_store_is_noticed(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job1"}, scan(work))
    for stored in (hosts.home("h0") / ".cache/gpurun/files").rglob("*"):
        if stored.is_file() and stored.stat().st_size == 300_000:
            stored.write_bytes(b"x" * 300_000)
    results = sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job2"}, scan(work))
    assert isinstance(results.failed["h0"], RemoteOpFailed) and results.failed["h0"].kind == "corrupt"
    assert not sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job2"}, scan(work)).failed
    assert shape(tmp_path / "h0/job2") == wanted(work)


def test_a_file_changed_with_the_same_size_and_time_is_seen(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job"}, scan(work))
    before = (work / "train.py").stat()
    (work / "train.py").write_text("print('ho')\n")
    os.utime(work / "train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job"}, scan(work))
    assert (tmp_path / "h0/job/train.py").read_text() == "print('ho')\n"


def test_one_host_that_fails_holds_up_no_other(hosts, work, tmp_path):
    fleet = hosts.fleet("h0", "h1")
    results = sync_workdir(fleet, {"h0": "relative/path", "h1": f"{tmp_path}/h1/job"}, scan(work))
    assert list(results.failed) == ["h0"] and list(results.ok) == ["h1"]
    assert shape(tmp_path / "h1/job") == wanted(work)


def test_what_is_no_folder_or_cannot_be_read(hosts, tmp_path):
    fleet = hosts.fleet("h0")
    with pytest.raises(BadInput, match="not a folder"):
        sync_workdir(fleet, {"h0": "/x"}, scan(tmp_path / "none"))


@pytest.mark.parametrize(
    "entries",
    [
        [["../evil", "file", 0o644, 0, 0, "sha256:" + "0" * 64, ""]],
        [["/evil", "dir", 0o755, 0, 0, "", ""]],
        [["a", "link", 0, 0, 0, "", "/tmp"], ["a/evil", "dir", 0o755, 0, 0, "", ""]],
        [["a", "dir", 0o755, 0, 0, "", ""], ["a", "link", 0, 0, 0, "", "/tmp"]],
        [["", "dir", 0o755, 0, 0, "", ""]],
        [["a//b", "dir", 0o755, 0, 0, "", ""]],
        [["a\0b", "dir", 0o755, 0, 0, "", ""]],
    ],
)
def test_names_that_lead_out_are_refused_by_the_host(hosts, tmp_path, entries):
    agent = hosts.fleet("h0").agents["h0"]
    with pytest.raises(RemoteOpFailed) as caught:
        agent.call("tree.make", dest=f"{tmp_path}/h0/job", entries=entries)
    assert caught.value.kind in ("refused", "bad-request")
    assert not Path("/tmp/evil").exists() and not (tmp_path / "h0/evil").exists()


def test_an_empty_folder(hosts, tmp_path):
    (tmp_path / "empty").mkdir()
    fleet = hosts.fleet("h0")
    assert sync_workdir(fleet, {"h0": f"{tmp_path}/h0/job"}, scan(tmp_path / "empty")).ok == {"h0": 0}
    assert list((tmp_path / "h0/job").iterdir()) == []


def test_a_second_scan_reads_no_file_again(tmp_path, monkeypatch, own_copy):
    top = tmp_path / "many"
    for number in range(10):
        (top / f"d{number}").mkdir(parents=True)
        for inner in range(10):
            (top / f"d{number}/{inner}").write_text(f"{number}/{inner}")
    old = time.time() - 100
    for path in top.rglob("*"):
        os.utime(path, (old, old))
    own_copy(tree, "time", time=lambda: time.time() + 2 * tree.RACY_S)
    first = scan(top)
    monkeypatch.setattr(tree, "_digest", lambda _: pytest.fail("a file is read again"))
    assert scan(top).entries == first.entries
