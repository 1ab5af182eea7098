"""A damaged copy of a set is found out and replaced; a host that lies about what it received harms only itself."""

import hashlib
import itertools
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hosted_sets import damage, describe_as_it_is, folder_of, shape

from gpurun.content import data as reading_folder
from gpurun.content import staging
from gpurun.content import tree as tree_memory
from gpurun.content.data import read_folder
from gpurun.content.staging import DataUser, Staging, damage_of, stage
from gpurun.errors import GpurunError
from gpurun.node.transfer import sets as node_data
from gpurun.node.transfer.spool import CHUNK
from gpurun.remote import RemoteOpFailed


def hashed_whole(at, parts):
    return "sha256:" + hashlib.sha256((at / os.fsdecode(b"/".join(parts))).read_bytes()).hexdigest()


def put(tree, fleet, *names, **how):
    return stage(tree.digest, tree, names, Staging(fleet, **how))


def refuses(agent, op, **detail):
    """Let a host say of each operation `op` that it received something corrupt."""
    real_call, real_stream = agent.call, agent.stream

    def refuse(name):
        if name == op:
            raise RemoteOpFailed("it is corrupt", kind="corrupt", detail=detail, host=agent.host)

    def call(name, **params):
        refuse(name)
        return real_call(name, **params)

    def stream(name, **params):
        refuse(name)
        return real_stream(name, **params)

    agent.call, agent.stream = call, stream


def lies_about_the_end(agent, digest):
    refuses(agent, "data.finish")


def lies_about_chunks(agent, digest):
    refuses(agent, "blobs.fetch", digest=digest, index=0)


LIES = [lies_about_the_end, lies_about_chunks]


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_calls_a_whole_copy_damaged_is_the_one_that_is_named(hosts, top, lie):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h0")
    lie(fleet.agents["h1"], tree.digest)
    report = stage(tree.digest, None, ["h1"], Staging(fleet), neighbours=["h0"])
    assert list(report.failed) == ["h1"] and report.bad_copies == {}
    assert "h0" in report.failed["h1"].message and report.failed["h1"].host == "h1"


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_calls_a_whole_copy_damaged_keeps_it_from_nobody(hosts, top, lie):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0")
    lie(fleet.agents["h1"], tree.digest)
    report = stage(tree.digest, None, ["h1", "h2"], Staging(fleet), neighbours=["h0"])
    assert list(report.failed) == ["h1"] and report.bad_copies == {}
    assert shape(folder_of(hosts, "h2") / tree.digest[7:] / "tree") == shape(top)


def test_a_holder_that_denies_its_damage_is_not_the_last_one_asked(hosts, top, monkeypatch):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    damage(hosts, "h0", tree.digest)
    describe_as_it_is(hosts, "h0", tree)
    monkeypatch.setattr(staging, "damage_of", lambda *_: None)
    report = stage(tree.digest, None, ["h2"], Staging(fleet), neighbours=["h0", "h1"])
    assert report.failed == {}
    assert shape(folder_of(hosts, "h2") / tree.digest[7:] / "tree") == shape(top)


@pytest.mark.parametrize("is_on_head", [False, True])
def test_a_member_whose_copy_is_found_damaged_gets_a_whole_one(hosts, top, is_on_head):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    damage(hosts, "h0", tree.digest)
    report = stage(tree.digest, tree if is_on_head else None, ["h0", "h1", "h2"], Staging(fleet))
    assert report.failed == {} and list(report.bad_copies) == ["h0"]
    assert {each.host: each.state for each in report.hosts} == {"h0": "done", "h1": "present", "h2": "done"}
    for host in ("h0", "h1", "h2"):
        assert shape(folder_of(hosts, host) / tree.digest[7:] / "tree") == shape(top)


@pytest.mark.parametrize("part", ["entries", "hashes"])
def test_a_member_whose_description_is_damaged_gets_a_whole_copy(hosts, top, part):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    (folder_of(hosts, "h0") / tree.digest[7:] / part).unlink()
    report = stage(tree.digest, None, ["h0", "h1", "h2"], Staging(fleet))
    assert report.failed == {} and list(report.bad_copies) == ["h0"]
    assert (folder_of(hosts, "h0") / tree.digest[7:] / part).exists()


def test_a_damaged_copy_that_another_job_uses_stays_and_fails_its_host(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    for job in ("j-00000001", "j-00000002"):
        for host in ("h0", "h1", "h2"):
            fleet.agents[host].call("gang.prepare", job=job, attempt=1, interface="", first=True, outputs=False)
    put(tree, fleet, "h0", "h1", user=DataUser("j-00000001", 1))
    damage(hosts, "h0", tree.digest)
    report = stage(tree.digest, None, ["h0", "h1", "h2"], Staging(fleet, user=DataUser("j-00000002", 1)))
    assert list(report.failed) == ["h0"] and "used by j-00000001" in report.failed["h0"].message
    assert (folder_of(hosts, "h0") / tree.digest[7:]).exists()


CHANGES = {
    "big": lambda there: (there / "big").write_bytes(b"short"),
    "same": lambda there: (there / "same").write_bytes(b"Hostile name"),
    "zero": lambda there: (there / "zero").unlink(),
    "link": lambda there: ((there / "link").unlink(), (there / "link").symlink_to("/etc")),
    "dangling": lambda there: ((there / "dangling").unlink(), (there / "dangling").mkdir()),
    "tool": lambda there: ((there / "tool").unlink(), os.mkfifo(there / "tool")),
    "kept.bin": lambda there: ((there / "kept.bin").unlink(), (there / "kept.bin").symlink_to("big")),
    "empty": lambda there: (there / "sub/empty").rmdir(),
    "hashes": lambda there: (there.parent / "hashes").write_bytes(b"h" * 32),
    "entries": lambda there: (there.parent / "entries").unlink(),
    "list of files": lambda there: (there.parent / "entries").write_bytes(node_data.packed([])),
    "the data set's files": lambda there: there.rename(there.parent / "gone"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_kind_of_damage_is_found_and_named(hosts, top, what):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    put(tree, fleet, "h0")
    agent, there = fleet.agents["h0"], folder_of(hosts, "h0") / tree.digest[7:] / "tree"
    assert damage_of(agent, tree.digest, lambda: None) is None
    for folder in (there, there / "sub", *(each for each in there.iterdir() if each.is_file())):
        folder.chmod(0o755)
    CHANGES[what](there)
    error = damage_of(agent, tree.digest, lambda: None)
    assert error is not None and what in error.message and error.host == "h0"


def test_a_check_reads_the_chunks_as_they_are_sent(hosts, tmp_path):
    """Many small files around the borders of chunks."""
    (tmp_path / "many").mkdir()
    for number, size in enumerate([1, CHUNK - 1, CHUNK, CHUNK + 1, 0, 2 * CHUNK, 7]):
        (tmp_path / f"many/{number}").write_bytes(os.urandom(size))
    fleet, tree = hosts.fleet("h0"), read_folder(tmp_path / "many")
    put(tree, fleet, "h0")
    assert damage_of(fleet.agents["h0"], tree.digest, lambda: None) is None


class Stop(GpurunError):
    pass


def describes(agent, how):
    """Let a host describe its sets as `how` does."""
    real = agent.stream
    agent.stream = lambda name, **params: (how if name == "data.manifest" else real)(name, **params)
    return real


@contextmanager
def endless(name, **_):
    """Say nothing, again and again."""
    yield itertools.repeat(SimpleNamespace(payload=b""))


def test_a_cancel_does_not_wait_for_a_holder_that_never_stops_describing_its_set(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h0")
    describes(fleet.agents["h0"], endless)
    asked = []

    def check():
        asked.append(1)
        if len(asked) > 20:
            raise Stop("stopped")

    with pytest.raises(Stop):
        stage(tree.digest, None, ["h1"], Staging(fleet, check=check), neighbours=["h0"])


@pytest.mark.parametrize("kind", ["silent", "endless"])
def test_a_holder_that_never_describes_its_set_is_not_waited_for(hosts, top, monkeypatch, kind):
    monkeypatch.setattr(reading_folder, "SILENCE_S" if kind == "silent" else "DESCRIBE_LIMIT_S", 0.5)
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")

    def silent(name, silence_s=None, **_):
        return real("probe.listen", address="127.0.0.1", ports=[[0, 0]], silence_s=silence_s)

    real = describes(fleet.agents["h0"], silent if kind == "silent" else endless)
    report = stage(tree.digest, None, ["h2"], Staging(fleet), neighbours=["h0", "h1"])
    assert report.failed == {} and list(report.bad_copies) == ["h0"]


def test_a_holder_that_is_lost_is_not_called_damaged(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    agent, real = fleet.agents["h0"], fleet.agents["h0"].call

    def call(name, **params):
        if name == "data.expect":
            hosts.kill("h0")
        return real(name, **params)

    agent.call = call
    report = stage(tree.digest, None, ["h2"], Staging(fleet), neighbours=["h0", "h1"])
    assert report.failed == {}
    assert not any("damaged" in error.message for error in report.bad_copies.values())


def test_a_set_with_zeros_that_an_older_gpurun_digested_is_still_that_set(hosts, top, monkeypatch):
    """It hashed zeros. Its memory of digests, its sets on hosts and the jobs that wait for them outlive the upgrade."""
    content = os.urandom(100_000) + bytes(300_000) + b"end"
    (top / "sparse").write_bytes(content)
    with monkeypatch.context() as before:
        before.setattr(tree_memory, "RACY_S", -1.0)
        before.setattr(reading_folder, "_digest", lambda at, found, _: hashed_whole(at, found.parts))
        old = read_folder(top).digest
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    assert tree.digest == old, "it has not changed since"
    assert put(tree, fleet, "h0").failed == {}
    assert stage(old, None, ["h1"], Staging(fleet), neighbours=["h0"]).failed == {}
    with fleet.agents["h1"].stream("data.verify", digest=old, silence_s=60.0) as told:
        list(told)
