"""Code on hosts is the code on the head: every byte, mode and link, and only what changed travels."""

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lying_host import LyingHost, said

from gpurun.content import staging, tree
from gpurun.content.data import DataFolder
from gpurun.content.staging import DIRECT_BYTES, DataUser, Staging, stage_code
from gpurun.content.tree import scan
from gpurun.content.workdir import Code, write_code
from gpurun.errors import BadInput, StateError
from gpurun.inventory.read import load_inventory
from gpurun.node import data
from gpurun.node.agent import frames
from gpurun.node.job import parts, rules
from gpurun.node.transfer import sets
from gpurun.node.transfer.sets import CODE, packed
from gpurun.node.transfer.spool import CHUNK
from gpurun.remote import Agent, Fleet, RemoteOpFailed
from gpurun.state.paths import StatePath
from gpurun.supervisor import start

JOB, OTHER = "j-00000001", "j-00000002"
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
    return DataFolder.of_workdir(work)


def as_a_job_keeps_it(work, folder):
    path = StatePath(folder) / "code"
    path.unlink() if path.exists() else None
    write_code(path, scan(work))
    return Code(path)


def own(hosts, name, job=JOB, attempt=1):
    """Let an attempt own the job's folder on a host, as `gang.prepare` does."""
    folder = hosts.home(name) / ".gpurun/jobs" / job
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempt").write_text(f"{attempt}\n")
    return folder / "workspace"


def send(hosts, fleet, code, *names, job=JOB, neighbours=(), **how):
    """Send code to hosts; return the report."""
    for name in names:
        own(hosts, name, job)
    return stage_code(code, names, Staging(fleet, user=DataUser(job, 1), store=CODE, **how), neighbours=neighbours)


def received(report):
    assert not report.failed, report.failed
    return {host.host: host.bytes_received for host in report.hosts}


def place(hosts, name, job=JOB):
    return hosts.home(name) / ".gpurun/jobs" / job / "workspace"


def set_of(hosts, name, code):
    return hosts.home(name) / ".gpurun/code" / code.timed_digest[7:] / "tree"


def ask(monkeypatch):
    """Count the operations of all agents."""
    asked, call = Counter(), staging.Agent.call
    monkeypatch.setattr(staging.Agent, "call", lambda self, op, **how: asked.update([op]) or call(self, op, **how))
    return asked


def test_both_sides_mean_one_name():
    assert sets.WORKSPACE == rules.CODE
    assert parts.kept_layer(JOB).endswith(sets.BESIDE)


@pytest.mark.parametrize("read", [as_it_is, as_a_job_keeps_it])
def test_the_same_on_every_host(hosts, work, tmp_path, read):
    fleet = hosts.fleet("h0", "h1")
    assert set(received(send(hosts, fleet, read(work, tmp_path), "h0", "h1"))) == {"h0", "h1"}
    for name in ("h0", "h1"):
        assert shape(place(hosts, name)) == wanted(work)


@pytest.mark.parametrize("read", [as_it_is, as_a_job_keeps_it])
def test_large_folders_go_through_a_chain(hosts, work, tmp_path, read):
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    names = ["h0", "h1", "h2"]
    fleet = hosts.fleet(*names)
    received(send(hosts, fleet, read(work, tmp_path), *names))
    for name in names:
        assert shape(place(hosts, name)) == wanted(work)
        assert list(hosts.spool(name).iterdir()) == []


def test_a_small_folder_needs_no_transfer(hosts, work, tmp_path, monkeypatch):
    fleet, asked = hosts.fleet("h0"), ask(monkeypatch)
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    assert asked == {"data.use": 1, "data.begin": 1, "data.put": 1}


@pytest.mark.parametrize("read", [as_it_is, as_a_job_keeps_it])
def test_only_what_changed_is_sent(hosts, work, tmp_path, read):
    fleet = hosts.fleet("h0")
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    assert received(send(hosts, fleet, read(work, tmp_path), "h0"))["h0"] > DIRECT_BYTES
    assert received(send(hosts, fleet, read(work, tmp_path), "h0", job=OTHER)) == {"h0": 0}
    assert place(hosts, "h0").resolve() == place(hosts, "h0", OTHER).resolve()
    (work / "train.py").write_text("print('changed')\n")
    (work / "pkg/data.bin").rename(work / "pkg/moved.bin")
    assert received(send(hosts, fleet, read(work, tmp_path), "h0")) == {"h0": len("print('changed')\n")}
    assert shape(place(hosts, "h0")) == wanted(work)


def test_of_a_large_change_the_rest_is_not_sent(hosts, work, tmp_path):
    """Chunks that hosts can make of what they have count as arrived."""
    fleet, size = hosts.fleet("h0", "h1"), 12 * CHUNK
    (work / "a-kept").write_bytes(os.urandom(size))
    (work / "pkg/new").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    received(send(hosts, fleet, as_a_job_keeps_it(work, tmp_path), "h0"))
    (work / "pkg/new").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    code = as_a_job_keeps_it(work, tmp_path)
    got = received(send(hosts, fleet, code, "h0", "h1"))
    assert DIRECT_BYTES + 12345 <= got["h0"] < DIRECT_BYTES + 12345 + 3 * CHUNK and got["h1"] == code.size
    for name in ("h0", "h1"):
        assert shape(place(hosts, name)) == wanted(work)


def test_a_host_that_joins_gets_the_code_from_its_neighbour(hosts, work, tmp_path, relays):
    fleet = hosts.fleet("h0", "h1")
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    code = as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    received(send(hosts, fleet, code, "h1", neighbours=["h0"]))
    assert [[(hop.host, hop.upstream) for hop in hops] for hops in relays[-1].chains] == [[("h0", None), ("h1", "h0")]]
    assert shape(place(hosts, "h1")) == wanted(work)


def test_code_that_differs_in_times_alone_is_another(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    os.utime(work / "train.py", ns=(5, 5))
    assert received(send(hosts, fleet, as_it_is(work, tmp_path), "h0", job=OTHER)) == {"h0": 0}
    assert place(hosts, "h0", OTHER).joinpath("train.py").stat().st_mtime_ns == 5
    assert place(hosts, "h0").joinpath("train.py").stat().st_mtime_ns != 5


def tampered(top, outside):
    (top / "ro").chmod(0o755)
    (top / "train.py").write_text("tampered!!!\n")
    (top / "zero").unlink()
    (top / "zero").mkdir()
    (top / "pkg/empty").rmdir()
    (top / "pkg/empty").symlink_to(outside)
    (top / "run.sh").unlink()
    (top / "run.sh").symlink_to(outside / "precious")


def grown(top, outside):
    (top / "extra").mkdir()
    (top / "extra/deep").symlink_to(outside)


def with_two_names(top, outside):
    os.link(top / "same", outside / "hard")


def cut(top, _outside):
    (top.parent / "entries").write_bytes(b"x")


@pytest.mark.parametrize("change", [tampered, grown, with_two_names, cut])
def test_what_is_not_the_code_any_more_is_replaced_and_a_running_job_keeps_what_it_has(hosts, work, tmp_path, change):
    fleet, outside = hosts.fleet("h0"), tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    code = as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    top = os.open(place(hosts, "h0"), os.O_RDONLY)  # as a mount has it
    change(set_of(hosts, "h0", code), outside)
    received(send(hosts, fleet, code, "h0", job=OTHER))
    assert shape(place(hosts, "h0", OTHER)) == wanted(work) == shape(place(hosts, "h0"))
    assert (outside / "precious").read_text() == "kept"
    assert "train.py" in os.listdir(top)
    os.close(top)
    (aside,) = (path for path in (hosts.home("h0") / ".gpurun/code").iterdir() if path.name.startswith(".damaged-"))
    for job in (JOB, OTHER):
        place(hosts, "h0", job).unlink()
    (work / "train.py").write_text("new")
    received(send(hosts, fleet, as_a_job_keeps_it(work, tmp_path), "h0"))
    assert not aside.exists()


def test_modes_and_times_are_restored(hosts, work, tmp_path):
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    (place(hosts, "h0") / "run.sh").chmod(0o600)
    (place(hosts, "h0") / "pkg").chmod(0o700)
    os.utime(place(hosts, "h0") / "train.py")
    assert received(send(hosts, fleet, code, "h0")) == {"h0": 0}
    assert shape(place(hosts, "h0")) == wanted(work)


def test_a_damaged_file_of_an_earlier_set_is_sent_anew(hosts, work, tmp_path):
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    (set_of(hosts, "h0", code) / "pkg/data.bin").write_bytes(b"x" * 300_000)
    (work / "zero").write_text("1")
    code = as_a_job_keeps_it(work, tmp_path)
    assert received(send(hosts, fleet, code, "h0")) == {"h0": 300_001}
    assert shape(place(hosts, "h0")) == wanted(work)


def test_a_neighbour_with_damaged_code_gives_it_to_nobody(hosts, work, tmp_path):
    fleet = hosts.fleet("h0", "h1")
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    code = as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    (set_of(hosts, "h0", code) / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    received(send(hosts, fleet, code, "h1", neighbours=["h0"]))
    assert shape(place(hosts, "h1")) == wanted(work)


def test_hosts_that_share_a_home_have_one_copy(hosts, work, tmp_path):
    (tmp_path / "h1").symlink_to(tmp_path / "h0")
    (tmp_path / "h0").mkdir()
    fleet, code = hosts.fleet("h0", "h1"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0", "h1"))
    assert shape(place(hosts, "h0")) == wanted(work) == shape(place(hosts, "h1"))
    kept = [path.name for path in (hosts.home("h0") / ".gpurun/code").iterdir()]
    assert sorted(kept) == [".lock", code.timed_digest[7:]]


def test_a_folder_that_an_older_gpurun_has_made_gives_way(hosts, work, tmp_path):
    fleet, older = hosts.fleet("h0"), own(hosts, "h0")
    (older / "ro").mkdir(parents=True)
    (older / "ro").chmod(0o555)
    (older / "old.py").write_text("old")
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    assert older.is_symlink() and shape(older) == wanted(work)


def unneeded(hosts, name="h0"):
    folder = hosts.home(name) / ".gpurun/code"
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock"))


@pytest.mark.parametrize("damage", [Path.unlink, lambda meta: meta.write_text(""), lambda meta: meta.write_text("{}")])
def test_what_a_power_cut_left_of_code_gives_way(hosts, work, tmp_path, damage):
    """Code is not synced: its files may be there without their content, and a cleaner may remove some."""
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    damage(set_of(hosts, "h0", code).parent / "set.json")
    (set_of(hosts, "h0", code) / "train.py").write_text("")
    received(send(hosts, fleet, code, "h0"))
    assert shape(place(hosts, "h0")) == wanted(work)


@pytest.mark.parametrize("damage", [Path.unlink, lambda meta: meta.write_text(""), lambda meta: meta.write_text("{}")])
def test_what_a_power_cut_left_of_unused_code_takes_no_space_for_ever(hosts, work, tmp_path, monkeypatch, damage):
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    place(hosts, "h0").unlink()
    damage(set_of(hosts, "h0", code).parent / "set.json")
    monkeypatch.setenv("HOME", str(hosts.home("h0")))
    sets.prune_code(frames.Call(1, lambda *_: None, False, b""))
    assert unneeded(hosts) == []


def test_what_cannot_be_removed_of_older_code_stops_no_job(tmp_path, monkeypatch):
    """Root has written into it, as `sudo python3` does beside the module that it imports."""
    monkeypatch.setenv("HOME", str(tmp_path))
    call = frames.Call(1, lambda *_: None, False, b"")
    for name in (".doomed-0123", f".damaged-{1:064x}-0123", f"{2:064x}"):
        (tmp_path / ".gpurun/code" / name).mkdir(parents=True)
        meta = {"digest": f"sha256:{name}", "bytes": 1, "files": 1}
        (tmp_path / ".gpurun/code" / name / "set.json").write_text(json.dumps(meta))
        os.utime(tmp_path / ".gpurun/code" / name / "set.json", (1, 1))
    monkeypatch.setattr(sets.below, "remove_path", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    sets.prune_code(call)
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    sets.prune_code(call)
    assert [path.name for path in (tmp_path / ".gpurun/code").iterdir()] == [".lock"]


def test_code_that_no_job_uses_goes_after_a_day(hosts, work, tmp_path):
    fleet, codes = hosts.fleet("h0"), []
    for number in range(4):
        (work / "zero").write_text(str(number))
        codes.append(as_a_job_keeps_it(work, tmp_path))
        received(send(hosts, fleet, codes[-1], "h0", job=f"j-0000000{number}"))
    used, of_outputs, old, _ = codes
    for code in (used, of_outputs, old):
        os.utime(set_of(hosts, "h0", code).parent / "set.json", (1, 1))
    place(hosts, "h0", "j-00000002").unlink()
    kept = hosts.home("h0") / ".gpurun/outputs/j-00000001.beside"
    kept.mkdir(parents=True)
    place(hosts, "h0", "j-00000001").rename(kept / "workspace")
    (work / "zero").write_text("new")
    newest = as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, newest, "h0"))
    assert unneeded(hosts) == sorted(code.timed_digest[7:] for code in (used, of_outputs, codes[3], newest))
    assert shape(kept / "workspace")


def test_code_that_no_job_uses_takes_a_small_part_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    call, now_s = frames.Call(1, lambda *_: None, False, b""), time.time()
    monkeypatch.setattr(sets.serve, "disk_of", lambda _: (1000, 1000))
    for number, age_s in enumerate([-1000.0, 30.0, 20.0, 10.0]):
        folder = Path(sets.folder_of_set(f"sha256:{number:064x}", CODE))
        folder.mkdir(parents=True)
        (folder / "set.json").write_text(json.dumps({"digest": f"sha256:{number:064x}", "bytes": 20, "files": 1}))
        os.utime(folder / "set.json", (now_s - age_s, now_s - age_s))

    def left():
        return sorted(int(one.digest[7:], 16) for one in sets.sets(store=CODE))

    with sets.alone_with_sets(call, CODE):
        sets.remove_unused_code(0)
        assert left() == [2, 3], "a time in the future is no recent use; 50 bytes are the share"
        sets.remove_unused_code(1010)
        assert left() == [3], "a full disk keeps nothing for later"
    sets.prune_code(call)
    assert left() == []


def test_a_home_without_locks_takes_code(work, tmp_path, monkeypatch):
    """As Lustre is without ``-o flock``. Nobody there removes what another agent receives."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sets.fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    code = as_it_is(work, tmp_path)
    name, entries = code.timed_digest, packed(code.entries)

    def call(payload=b""):
        return frames.Call(1, lambda *_: None, False, payload)

    lacks = data.begin_set(call(entries), "one", name, store=CODE, direct=1 << 20)
    data.begin_set(call(entries), "other", name, store=CODE, direct=1 << 20)
    data.put(call(b"".join(staging._contents(code, lacks))), "one")
    data.put(call(b"".join(staging._contents(code, lacks))), "other")
    for transfer in ("one", "other"):
        data.drop(call(), transfer)
    (tmp_path / ".gpurun/jobs" / JOB).mkdir(parents=True)
    (tmp_path / ".gpurun/jobs" / JOB / "attempt").write_text("1\n")
    assert data.use(call(), [name], JOB, 1, store=CODE) == [name]
    assert shape(tmp_path / ".gpurun/jobs" / JOB / "workspace") == wanted(work)


def test_a_home_without_locks_takes_code_also_after_an_upgrade(work, tmp_path, monkeypatch):
    """An older gpurun kept contents there, and had no locks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sets.fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    older, begun = tmp_path / ".cache/gpurun/files/ab/abcd", tmp_path / ".cache/gpurun/spool/old.part"
    for file in (older, begun):
        file.parent.mkdir(parents=True)
        file.write_text("x")
        os.utime(file, (1, 1))
    code = as_it_is(work, tmp_path)
    call = frames.Call(1, lambda *_: None, False, packed(code.entries))
    data.begin_set(call, "t", code.timed_digest, store=CODE, direct=1 << 20)
    data.drop(call, "t")
    sets.blobs.Spool(sets.blobs.spool_folder(), "t")
    assert not older.exists() and not begun.exists(), "after a day, nobody uses them any more"


def nfs(descriptor, kind, flock=fcntl.flock):
    """Lock as NFS does: a file must be open for writing to be locked against all others (flock(2))."""
    if kind & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, kind)


def test_a_home_on_nfs_takes_code(work, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sets.fcntl, "flock", nfs)
    code = as_it_is(work, tmp_path)

    def call(payload=b""):
        return frames.Call(1, lambda *_: None, False, payload)

    lacks = data.begin_set(call(packed(code.entries)), "one", code.timed_digest, store=CODE, direct=1 << 20)
    data.put(call(b"".join(staging._contents(code, lacks))), "one")
    sets.prune_code(call())
    assert not (tmp_path / ".gpurun/code" / code.timed_digest[7:]).exists(), "no process held it"


def test_what_an_older_gpurun_kept_of_code_goes_once_nothing_uses_it(hosts, work, tmp_path):
    fleet, older = hosts.fleet("h0"), hosts.home("h0") / ".cache/gpurun/files"
    (older / "ab").mkdir(parents=True)
    for name, age_s in (("used", 0), ("unused", 100_000)):
        (older / "ab" / name).write_text("x")
        os.utime(older / "ab" / name, (time.time() - age_s,) * 2)
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    assert [path.name for path in (older / "ab").iterdir()] == ["used"]


def test_code_that_changed_on_the_head_is_sent_to_no_host(hosts, work, tmp_path):
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    whole = (tmp_path / "code").read_bytes()
    (tmp_path / "code").write_bytes(whole[:-300_000] + b"x" * 300_000)
    with pytest.raises(StateError, match="damaged"):
        stage_code(code, ["h0"], Staging(fleet, store=CODE))
    assert unneeded(hosts) == []
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    code = as_a_job_keeps_it(work, tmp_path)
    hashes = code.chunk_hashes()
    code.chunk_hashes = lambda: hashes
    (tmp_path / "code").write_bytes((tmp_path / "code").read_bytes()[:-300_000])
    with pytest.raises(StateError, match="damaged"):
        stage_code(code, ["h0"], Staging(fleet, store=CODE))
    assert unneeded(hosts) == []


@pytest.fixture
def relays(monkeypatch):
    """Every transfer's chains and options."""
    made = []

    def relay(fleet, chains, options, *others):
        made.append(SimpleNamespace(chains=chains, options=options))
        return Relay(fleet, chains, options, *others)

    Relay = staging.Relay
    monkeypatch.setattr(staging, "Relay", relay)
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
    for name in names:
        own(hosts, name)
    job = SimpleNamespace(
        spec=SimpleNamespace(workdir=str(work), code=""), lease=SimpleNamespace(job=JOB, attempt=1), members=names,
        links=SimpleNamespace(fleet=hosts.fleet(*names), is_open=lambda _: True),
        inventory=load_inventory(tmp_path / "inventory.yaml"),
        sending=SimpleNamespace(told=lambda kind, event: events.append((kind, event))),
    )  # fmt: skip
    start._send_workdir(job, names, lambda: False)
    ends = {event.host: event for kind, event in events if kind == "workdir"}
    assert {host: event.state for host, event in ends.items()} == dict.fromkeys(names, "done")
    assert all(event.bytes == event.total > DIRECT_BYTES for event in ends.values())
    (relay,) = relays
    assert [[(hop.host, hop.upstream) for hop in hops] for hops in relay.chains] == ways
    assert relay.options.addresses == dict.fromkeys(names, "127.0.0.1") and set(relay.options.interfaces) == set(names)
    for name in names:
        assert shape(place(hosts, name)) == wanted(work)


def test_a_job_that_is_cancelled_meanwhile_waits_for_no_code(hosts, work):
    own(hosts, "h0")
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 12345))
    job = SimpleNamespace(
        spec=SimpleNamespace(workdir=str(work), code=""), lease=SimpleNamespace(job=JOB, attempt=1), members=["h0"],
        links=SimpleNamespace(fleet=hosts.fleet("h0"), is_open=lambda _: True), inventory=None,
        sending=SimpleNamespace(told=lambda *_: None),
    )  # fmt: skip
    with pytest.raises(start.GangEnd):
        start._send_workdir(job, ["h0"], lambda: True)
    assert unneeded(hosts) == []


def test_a_file_changed_with_the_same_size_and_time_is_seen(hosts, work, tmp_path):
    fleet = hosts.fleet("h0")
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    before = (work / "train.py").stat()
    (work / "train.py").write_text("print('ho')\n")
    os.utime(work / "train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    received(send(hosts, fleet, as_it_is(work, tmp_path), "h0"))
    assert (place(hosts, "h0") / "train.py").read_text() == "print('ho')\n"


def test_one_host_that_fails_holds_up_no_other(hosts, work, tmp_path):
    fleet = hosts.fleet("h0", "h1")
    own(hosts, "h0").parent.joinpath("attempt").write_text("2")
    own(hosts, "h1")
    report = stage_code(as_it_is(work, tmp_path), ["h0", "h1"], Staging(fleet, user=DataUser(JOB, 1), store=CODE))
    assert list(report.failed) == ["h0"] and report.failed["h0"].kind == "fenced"
    assert shape(place(hosts, "h1")) == wanted(work) and not place(hosts, "h0").exists()


def test_what_is_no_folder_or_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match="not a folder"):
        DataFolder.of_workdir(tmp_path / "none")


@pytest.mark.parametrize(
    "entries",
    [
        [["../evil", "file", 0o644, 0, 0, "sha256:" + "0" * 64, ""]],
        [["/evil", "dir", 0o755, 0, 0, "", ""]],
        [["a", "link", 0, 0, 0, "", "/tmp"], ["a/evil", "dir", 0o755, 0, 0, "", ""]],
        [["", "dir", 0o755, 0, 0, "", ""]],
        [["a//b", "dir", 0o755, 0, 0, "", ""]],
        [["a\0b", "dir", 0o755, 0, 0, "", ""]],
    ],
)
def test_names_that_lead_out_are_refused_by_the_host(hosts, tmp_path, entries):
    agent = hosts.fleet("h0").agents["h0"]
    with pytest.raises(RemoteOpFailed) as caught:
        agent.call(
            "data.begin", transfer="t", digest="sha256:" + "0" * 64, store=CODE, direct=1, payload=packed(entries)
        )
    assert caught.value.kind in ("refused", "bad-request", "not-found")
    assert not Path("/tmp/evil").exists() and not (tmp_path / "h0/evil").exists()


def begun(agent, content=b"x" * 100):
    entry = ["f", "file", 0o644, 0, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}", ""]
    call = {"transfer": "t", "digest": "sha256:" + "0" * 64, "store": CODE, "direct": 1000}
    assert agent.call("data.begin", payload=packed([entry]), **call).value == [entry[5]]
    return entry[5]


@pytest.mark.parametrize("other", [b"y" * 100, b"x" * 99, b"x" * 101, b""])
def test_a_host_takes_no_other_content(hosts, other):
    agent = hosts.fleet("h0").agents["h0"]
    digest = begun(agent)
    with pytest.raises(RemoteOpFailed) as caught:
        list(agent.stream("data.put", transfer="t", payload_in=[frames.encode({"d": digest}, other)]))
    assert caught.value.kind == "corrupt"
    agent.call("data.drop", transfer="t")
    assert unneeded(hosts) == []


def test_a_host_takes_no_content_that_it_does_not_lack_and_completes_nothing_half(hosts):
    agent = hosts.fleet("h0").agents["h0"]
    begun(agent)
    with pytest.raises(RemoteOpFailed, match="does not lack"):
        list(agent.stream("data.put", transfer="t", payload_in=[frames.encode({"d": "sha256:" + "1" * 64}, b"x")]))
    with pytest.raises(RemoteOpFailed, match="has not arrived"):
        list(agent.stream("data.put", transfer="t", payload_in=[]))
    with pytest.raises(RemoteOpFailed, match="has not arrived"):
        agent.call("data.finish", transfer="t")


def test_a_store_that_is_none_becomes_no_path(hosts):
    agent = hosts.fleet("h0").agents["h0"]
    with pytest.raises(RemoteOpFailed, match="not a store"):
        agent.call("data.use", digests=["sha256:" + "0" * 64], store="../..")


def test_a_host_that_lacks_what_was_not_offered_is_refused(hosts, work, tmp_path, monkeypatch):
    """It would be sent any content of the job's code; but it may ask for nothing else."""
    fleet = hosts.fleet("h0")
    call = staging.Agent.call

    def lie(self, op, **how):
        said = call(self, op, **how)
        return SimpleNamespace(value=["sha256:" + "0" * 64]) if op == "data.begin" else said

    monkeypatch.setattr(staging.Agent, "call", lie)
    report = stage_code(as_it_is(work, tmp_path), ["h0"], Staging(fleet, store=CODE))
    assert report.failed["h0"].kind == "bad-answer"


def test_a_host_is_sent_directly_no_more_than_little(hosts, work, tmp_path, monkeypatch):
    """The head does not wait for more, neither for a job's end."""
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 1))
    code, call = as_it_is(work, tmp_path), staging.Agent.call

    def lie(self, op, **how):
        said = call(self, op, **how)
        return SimpleNamespace(value=list(code.files)) if op == "data.begin" else said

    monkeypatch.setattr(staging.Agent, "call", lie)
    report = stage_code(code, ["h0"], Staging(hosts.fleet("h0"), store=CODE))
    assert report.failed["h0"].kind == "bad-answer"


@pytest.mark.parametrize("kind", ["out", "part"])
def test_a_host_that_never_ends_to_take_code_holds_up_its_job_for_a_limited_time(work, tmp_path, monkeypatch, kind):
    """Each of its answers came in time: the head would wait for ever, and could not even cancel the job."""
    monkeypatch.setattr(staging, "CODE_LIMIT_S", 0.5)
    stopped = Event()

    def lie(request):
        while request["op"] == "data.put" and not stopped.is_set():
            yield said({"t": kind, "id": request["id"], "v": None})
            time.sleep(0.05)
        value = {"data.use": [], "data.begin": []}.get(request["op"])
        yield said({"t": "done", "id": request["id"], "v": value})

    class Host(LyingHost):
        def sendall(self, data):
            Thread(target=super().sendall, args=(data,), daemon=True).start()

    with closing(Agent("liar", Host(lie), frames.Frame({"t": "hello"}, b""), frames.Decoder())) as agent:
        how = Staging(Fleet({"liar": agent}, {}), store=CODE)
        job = Thread(target=stage_code, args=(as_it_is(work, tmp_path), ["liar"], how), daemon=True)
        job.start()
        job.join(10.0)
        stopped.set()
        assert not job.is_alive()


def test_a_slow_disk_has_the_time_that_large_code_takes(hosts, monkeypatch):
    """It is read before each attempt, and earlier sets are searched for what is in it. 16 GiB in 600 s are 29 MB/s."""
    code = SimpleNamespace(timed_digest="sha256:" + "0" * 64, size=16 << 30, entries=[], files={})
    asked, call = {}, staging.Agent.call
    monkeypatch.setattr(
        staging.Agent, "call", lambda self, op, **how: asked.update({op: how["timeout_s"]}) or call(self, op, **how)
    )
    send(hosts, hosts.fleet("h0"), code, "h0")
    assert all(asked[op] > code.size / 10e6 for op in ("data.use", "data.begin"))


def test_a_neighbour_that_does_not_answer_holds_up_no_join_for_long(hosts, work, tmp_path, monkeypatch):
    """It reads nothing: it only says whether it has the code."""
    (work / "big").write_bytes(os.urandom(DIRECT_BYTES + 1))
    fleet, code, call = hosts.fleet("h0", "h1"), as_it_is(work, tmp_path), staging.Agent.call
    received(send(hosts, fleet, code, "h0"))
    limits = {}

    def note(self, op, **how):
        limits[self.host, op] = how.get("timeout_s")
        return call(self, op, **how)

    monkeypatch.setattr(staging.Agent, "call", note)
    received(send(hosts, fleet, code, "h1", neighbours=["h0"]))
    assert limits["h0", "data.use"] == staging.ASK_LIMIT_S < limits["h1", "data.use"]


def test_what_a_container_writes_keeps_no_code(hosts, work, tmp_path):
    fleet, code = hosts.fleet("h0"), as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, code, "h0"))
    outputs = hosts.home("h0") / ".gpurun/outputs" / JOB
    outputs.mkdir(parents=True)
    place(hosts, "h0").rename(outputs / "workspace")
    os.utime(set_of(hosts, "h0", code).parent / "set.json", (1, 1))
    (work / "zero").write_text("new")
    newest = as_a_job_keeps_it(work, tmp_path)
    received(send(hosts, fleet, newest, "h0"))
    assert unneeded(hosts) == [newest.timed_digest[7:]]


def test_an_empty_folder(hosts, tmp_path):
    (tmp_path / "empty").mkdir()
    fleet = hosts.fleet("h0")
    assert received(send(hosts, fleet, as_it_is(tmp_path / "empty", tmp_path), "h0")) == {"h0": 0}
    assert list(place(hosts, "h0").iterdir()) == []


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
