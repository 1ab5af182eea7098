"""A set is on hosts byte for byte, once per content, from the folder or from a neighbour; else nothing of it is."""

import os
import shutil
import stat
import time
import zlib

import pytest
from hosted_sets import damage, describe_as_it_is, folder_of, shape

from gpurun.content.data import CHANGED, read_folder
from gpurun.content.staging import DataUser, Staging, damage_of, stage
from gpurun.errors import BadInput, GpurunError, HostFailure, HostNotReady, HostUnreachable
from gpurun.node.agent.frames import OpError
from gpurun.node.transfer import sets
from gpurun.remote import Fleet
from gpurun.state import caches


def names_in(hosts, name):
    return sorted(each.name for each in folder_of(hosts, name).iterdir() if each.name != ".lock")


def put(tree, fleet, *names, **how):
    return stage(tree.digest, tree, names, Staging(fleet, **how))


def test_a_set_is_the_same_on_every_host_and_travels_once(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    seen = []
    report = put(tree, fleet, "h0", "h1", progress=seen.append)
    assert report.failed == {}
    assert [(each.host, each.state, each.bytes_received) for each in report.hosts] == [
        ("h0", "done", tree.size), ("h1", "done", tree.size),
    ]  # fmt: skip
    for name in ("h0", "h1"):
        assert names_in(hosts, name) == [tree.digest[7:]]
        there = folder_of(hosts, name) / tree.digest[7:] / "tree"
        assert shape(there) == shape(top)
        assert stat.S_IMODE((there / "tool").stat().st_mode) == 0o555
        assert stat.S_IMODE((there / "big").stat().st_mode) == 0o444
        assert stat.S_IMODE((there / "sub").stat().st_mode) == 0o555
    assert seen[-1].state == "done"
    assert seen[-1].total == tree.size
    again = put(read_folder(top), fleet, "h0", "h1")
    assert [(each.state, each.bytes_received) for each in again.hosts] == [("present", 0), ("present", 0)]
    assert caches.hosts_of(tree.digest) == {"h0", "h1"}


MIB, GIB = 1 << 20, 1 << 30


def sparse(path, size, *parts):
    with path.open("wb") as file:
        for position, content in parts:
            file.seek(position)
            file.write(content)
        file.truncate(size)


def test_a_hole_costs_nothing_on_the_way_to_a_host_and_to_its_neighbour(hosts, tmp_path):
    """17 MiB stored in 16 GiB: neither hashed, sent, written nor read."""
    (tmp_path / "holes").mkdir()
    some = os.urandom(8 * MIB)
    sparse(tmp_path / "holes/db", 16 * GIB, (5 * GIB + 12345, some), (16 * GIB - 9 * MIB, some + some[:MIB]))
    sparse(tmp_path / "holes/empty", GIB + 1)
    (tmp_path / "holes/after").write_bytes(b"after")
    began_s = time.process_time()
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(tmp_path / "holes")
    report = put(tree, fleet, "h0")
    assert report.failed == {} and report.size_bytes == tree.size > 17 * GIB
    again = stage(tree.digest, None, ["h1"], Staging(fleet), neighbours=["h0"])  # reads all of it again
    assert again.failed == {} and again.hosts[0].bytes_received == report.hosts[0].bytes_received < 19 * MIB
    assert damage_of(fleet.agents["h1"], tree.digest, lambda: None) is None
    assert time.process_time() - began_s < 2.0
    for host in ("h0", "h1"):
        there = folder_of(hosts, host) / tree.digest[7:] / "tree"
        assert {path.name: path.stat().st_size for path in there.iterdir()} == {
            "db": 16 * GIB, "empty": GIB + 1, "after": 5,
        }  # fmt: skip
        with (there / "db").open("rb") as file:
            assert os.pread(file.fileno(), 8 * MIB + 2, 5 * GIB + 12344) == b"\0" + some + b"\0"
            assert os.pread(file.fileno(), 10 * MIB, 16 * GIB - 9 * MIB) == some + some[:MIB]
        assert sum(path.stat().st_blocks * 512 for path in there.iterdir()) < 20 * MIB


def test_a_byte_where_the_hole_was_is_damage(hosts, tmp_path):
    (tmp_path / "holes").mkdir()
    sparse(tmp_path / "holes/db", 64 * MIB, (0, b"begin"))
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(tmp_path / "holes")
    put(tree, fleet, "h0")
    there = folder_of(hosts, "h0") / tree.digest[7:] / "tree/db"
    there.chmod(0o600)
    with there.open("r+b") as file:
        file.seek(40 * MIB)
        file.write(b"x")
    error = damage_of(fleet.agents["h0"], tree.digest, lambda: None)
    assert error is not None and "'db'" in error.message
    assert put(tree, fleet, "h1").failed == {}  # from the head, and the byte is not what was announced
    os.truncate(there, 1 << 40)
    error = damage_of(fleet.agents["h0"], tree.digest, lambda: None)
    assert error is not None and "'db'" in error.message


@pytest.mark.parametrize("is_damaged", [False, True])
def test_files_that_a_host_has_from_another_set_are_not_sent(hosts, tmp_path, is_damaged):
    """Each is read; a host passes them on, too; holes stay holes."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    large = os.urandom(4 * MIB)
    sparse(first / "db", 64 * MIB, (32 * MIB + 5, large))
    (first / "part").write_bytes(large[:MIB])
    shutil.copytree(first, second, dirs_exist_ok=True)
    (second / "a-new").write_bytes(os.urandom(1000))
    (second / "again").write_bytes(large[:MIB])
    fleet = hosts.fleet("h0", "h1")
    old, new = read_folder(first), read_folder(second)
    assert put(old, fleet, "h0").failed == {}
    there = folder_of(hosts, "h0") / old.digest[7:] / "tree/db"
    if is_damaged:
        there.chmod(0o600)
        with there.open("r+b") as file:
            file.seek(5)
            file.write(b"x")  # where the hole was
    report = put(new, fleet, "h0", "h1")
    assert report.failed == {}
    got = {each.host: each.bytes_received for each in report.hosts}
    assert 4 * MIB < got["h1"] < 8 * MIB
    assert (got["h0"] > 4 * MIB) if is_damaged else (got["h0"] <= 3 * 256 << 10)
    for host in ("h0", "h1"):
        assert damage_of(fleet.agents[host], new.digest, lambda: None) is None
        copy = folder_of(hosts, host) / new.digest[7:] / "tree"
        assert shape(copy) == shape(second)
        assert (copy / "db").stat().st_blocks * 512 < 5 * MIB
        assert (copy / "part").stat().st_nlink == 1


def test_an_empty_folder_is_a_set(hosts, tmp_path):
    (tmp_path / "none").mkdir()
    tree = read_folder(tmp_path / "none")
    assert put(tree, hosts.fleet("h0"), "h0").failed == {}
    assert names_in(hosts, "h0") == [tree.digest[7:]]


def test_data_that_change_while_they_are_sent_are_refused_and_leave_nothing(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h1")  # the hashes are known from here on
    (top / "big").write_bytes(os.urandom(3_000_000))
    with pytest.raises(BadInput, match=CHANGED):
        put(tree, fleet, "h0")
    assert names_in(hosts, "h0") == []


@pytest.mark.parametrize("change", ["gone", "short"])
def test_a_file_that_goes_while_data_are_sent(hosts, top, change):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h1")
    (top / "big").unlink() if change == "gone" else os.truncate(top / "big", 5)
    with pytest.raises(BadInput, match=CHANGED):
        put(tree, fleet, "h0")
    assert names_in(hosts, "h0") == []


def test_a_full_host_is_named_and_the_others_have_the_set(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    report = put(tree, fleet, "h0", "h1", "h2", quotas={"h1": 1 << 20})
    assert [each.state for each in report.hosts] == ["done", "failed", "done"]
    error = report.failed["h1"]
    assert isinstance(error, HostNotReady)
    assert "has no room for a data set" in error.message
    assert "gpurun data evict" in error.hint
    assert names_in(hosts, "h1") == []


def test_a_joining_host_gets_the_set_from_its_neighbour_although_the_folder_is_gone(hosts, top, tmp_path):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h0")
    wanted = shape(top)
    top.rename(tmp_path / "moved")
    report = stage(tree.digest, None, ["h1"], Staging(fleet), neighbours=["h0"])
    assert report.failed == {}
    assert report.size_bytes == tree.size
    assert shape(folder_of(hosts, "h1") / tree.digest[7:] / "tree") == wanted


def test_a_set_that_nobody_has_any_more(hosts, top):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    caches.note_sites(tree.digest, has=["h1"])  # which has removed it since
    with pytest.raises(BadInput, match="no host has a copy"):
        stage(tree.digest, None, ["h0"], Staging(fleet, reach=lambda names: hosts.fleet(*names)))
    assert caches.hosts_of(tree.digest) == frozenset()


def test_a_set_whose_only_host_is_off_is_not_gone(hosts, top):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    caches.note_sites(tree.digest, has=["h1"])
    off = Fleet({}, {"h1": HostUnreachable("no route to host", host="h1"), "h9": HostUnreachable("x", host="h9")})
    with pytest.raises(HostFailure, match="h1 had a copy, but h1 failed: no route to host") as caught:
        stage(tree.digest, None, ["h0"], Staging(fleet, reach=lambda _: off))
    assert (caught.value.kind, caught.value.host) == ("unreachable", "h1")
    assert caches.hosts_of(tree.digest) == {"h1"}


def test_a_set_whose_only_host_breaks_off_when_it_is_asked_is_not_gone(hosts, top):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    caches.note_sites(tree.digest, has=["h1"])
    other = hosts.fleet("h1")
    other.agents["h1"].close()
    with pytest.raises(HostFailure, match="h1 had a copy") as caught:
        stage(tree.digest, None, ["h0"], Staging(fleet, reach=lambda _: other))
    assert (caught.value.kind, caught.value.host) == ("unreachable", "h1")


def test_a_set_that_only_a_host_beyond_the_gang_has(hosts, top):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    other = hosts.fleet("h1")
    put(tree, other, "h1")
    report = stage(tree.digest, None, ["h0"], Staging(fleet, reach=lambda _: other))
    assert report.failed == {}
    assert names_in(hosts, "h0") == [tree.digest[7:]]


def test_a_neighbour_with_damaged_data_is_found_out(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    put(tree, fleet, "h0")
    there = folder_of(hosts, "h0") / tree.digest[7:] / "tree/big"
    there.chmod(0o600)
    there.write_bytes(os.urandom(3_000_000))
    with pytest.raises(GpurunError, match="damaged") as caught:
        stage(tree.digest, None, ["h1"], Staging(fleet), neighbours=["h0"])
    assert caught.value.host == "h0"
    assert names_in(hosts, "h1") == []
    healed = stage(tree.digest, tree, ["h1"], Staging(fleet), neighbours=["h0"])
    assert healed.failed == {}
    assert shape(folder_of(hosts, "h1") / tree.digest[7:] / "tree") == shape(top)


def test_the_next_holder_gives_the_set_where_the_first_ones_copy_is_damaged_and_that_one_is_named(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2", "h3"), read_folder(top)
    put(tree, fleet, "h0", "h1", "h2")
    damage(hosts, "h0", tree.digest)
    (folder_of(hosts, "h1") / tree.digest[7:] / "entries").write_bytes(b"x")
    report = stage(tree.digest, None, ["h3"], Staging(fleet), neighbours=["h0", "h1", "h2"])
    assert report.failed == {}
    assert list(report.bad_copies) == ["h0", "h1"] and "damaged" in report.bad_copies["h0"].message
    assert list(report.as_json()["bad_copies"]) == ["h0", "h1"]
    assert shape(folder_of(hosts, "h3") / tree.digest[7:] / "tree") == shape(top)


def test_a_holder_whose_hashes_fit_its_damage_is_found_out(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    damage(hosts, "h0", tree.digest)
    describe_as_it_is(hosts, "h0", tree)
    report = stage(tree.digest, None, ["h2"], Staging(fleet), neighbours=["h0", "h1"])
    assert report.failed == {} and list(report.bad_copies) == ["h0"]


def test_where_every_copy_is_damaged_each_host_is_named(hosts, top):
    fleet, tree = hosts.fleet("h0", "h1", "h2"), read_folder(top)
    put(tree, fleet, "h0", "h1")
    for host in ("h0", "h1"):
        damage(hosts, host, tree.digest)
    with pytest.raises(GpurunError, match="damaged on h0, h1, and gpurun knows no other copy"):
        stage(tree.digest, None, ["h2"], Staging(fleet), neighbours=["h0", "h1"])
    assert names_in(hosts, "h2") == []


def test_entries_that_crash_what_reads_them_are_a_damaged_copy():
    for row in ("[[[[", "[" * 100_000, '[["a","file",1e999,0,0,"",""]]'):
        with pytest.raises(OpError, match="cannot be read"):
            sets.unpacked(zlib.compress(row.encode()))


def test_a_neighbour_that_describes_another_set(hosts, top, tmp_path):
    fleet, tree = hosts.fleet("h0", "h1"), read_folder(top)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/train.csv").write_text("poison")
    evil = read_folder(tmp_path / "evil")
    put(evil, fleet, "h0")
    (folder_of(hosts, "h0") / evil.digest[7:]).rename(folder_of(hosts, "h0") / tree.digest[7:])
    with pytest.raises(HostFailure, match="damaged on h0"):
        stage(tree.digest, None, ["h1"], Staging(fleet), neighbours=["h0"])
    assert names_in(hosts, "h1") == []


def test_a_set_of_a_job_that_runs_is_not_removed_for_another(hosts, top, tmp_path):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    agent = fleet.agents["h0"]
    agent.call("gang.prepare", job="j-00000001", attempt=1, interface="", first=True, outputs=False)
    put(tree, fleet, "h0", user=DataUser("j-00000001", 1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_bytes(os.urandom(3_000_000))
    other = read_folder(tmp_path / "other")
    assert put(other, fleet, "h0", quotas={"h0": 5_000_000}).failed["h0"]
    assert agent.call("data.evict", digests=[tree.digest]).value == {tree.digest: "used by j-00000001"}
    agent.call("gang.fence", job="j-00000001", attempt=1, containers=False)
    assert put(other, fleet, "h0", quotas={"h0": 5_000_000}, keep=[tree.digest]).failed["h0"]
    assert put(other, fleet, "h0", quotas={"h0": 5_000_000}).failed == {}
    assert names_in(hosts, "h0") == [other.digest[7:]]


def test_two_jobs_stage_one_set_at_once(hosts, top):
    from threading import Thread

    tree = read_folder(top)
    reports = []
    fleet = hosts.fleet("h0", "h1")
    threads = [Thread(target=lambda: reports.append(put(tree, fleet, "h0", "h1"))) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(each.state for report in reports for each in report.hosts) == ["done", "done", "present", "present"]
    assert names_in(hosts, "h0") == [tree.digest[7:]]


def test_what_a_killed_agent_left_goes_with_the_next(hosts, top):
    fleet, tree = hosts.fleet("h0"), read_folder(top)
    left = folder_of(hosts, "h0") / ".arriving-x"
    (left / "tree").mkdir(parents=True)
    (left / "set.json").write_text("{}")
    (folder_of(hosts, "h0") / ".doomed-x/tree").mkdir(parents=True)
    put(tree, fleet, "h0")
    assert names_in(hosts, "h0") == [tree.digest[7:]]
    listed = fleet.agents["h0"].call("data.list").value["sets"]
    assert [(each["digest"], each["bytes"], each["jobs"]) for each in listed] == [(tree.digest, tree.size, [])]
