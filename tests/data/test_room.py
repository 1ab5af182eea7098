"""Which sets go when room is needed, and what a host refuses to receive. Its free space is what the test says."""

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.node import data
from gpurun.node.agent import frames, serve
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.transfer import blobs, sets
from gpurun.node.transfer.sets import CODE, DataSet, choose_evicted

GIB = 1 << 30
DIGESTS = [f"sha256:{number:064x}" for number in range(6)]
SETS = st.lists(
    st.builds(
        lambda number, size, used_s, job, moving: DataSet(DIGESTS[number], size, 1, used_s, job, moving),
        st.integers(0, 5), st.integers(0, 9), st.floats(0, 9), st.sampled_from([(), (), ("j-00000001",)]),
        st.sampled_from([False, False, True]),
    ),
    unique_by=lambda each: each.digest,
)  # fmt: skip


@given(SETS, st.integers(0, 20), st.integers(0, 30), st.integers(-5, 30), st.frozensets(st.sampled_from(DIGESTS)))
def test_what_goes_is_used_by_nobody_and_no_more_than_needed(here, size, quota, spare, keep):
    by_digest = {each.digest: each for each in here}
    free_to_go = [each for each in here if not each.jobs and not each.is_moving and each.digest not in keep]
    rest = sum(each.size for each in here) - sum(each.size for each in free_to_go)
    try:
        going = choose_evicted(size, here, quota, spare, keep)
    except OpError as error:
        assert error.kind == "no-space"
        assert size > quota - rest or size > spare + sum(each.size for each in free_to_go)
        return
    freed = sum(by_digest[digest].size for digest in going)
    assert {*going} <= {each.digest for each in free_to_go}
    assert size <= quota - sum(each.size for each in here) + freed and size <= spare + freed
    assert [by_digest[digest].used_s for digest in going] == sorted(each.used_s for each in free_to_go)[: len(going)]
    if going:
        last = by_digest[going[-1]].size
        assert not (size <= quota - sum(e.size for e in here) + freed - last and size <= spare + freed - last)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """This process as a host, whose disk is as large and as free as `disk` says."""
    monkeypatch.setenv("GPURUN_FOLDER", str(tmp_path / "host"))
    made = SimpleNamespace(
        call=Call(1, lambda *_: None, False, b""), disk=(100 * GIB, 200 * GIB), top=tmp_path / "host"
    )
    monkeypatch.setattr(serve, "disk_of", lambda _: made.disk)
    monkeypatch.setattr(blobs, "find_transfer", lambda _: SimpleNamespace(blobs={}))
    monkeypatch.setattr(data, "_arriving", {})
    yield made
    for transfer in list(data._arriving):
        data.drop(made.call, transfer)


def begin(host, rows, digest=DIGESTS[0], transfer="t", **how):
    call = Call(1, lambda *_: None, False, sets.packed(rows))
    data.begin_set(call, transfer, digest, **how)


def names(host):
    return sorted(name for name in os.listdir(host.top / "data") if name != ".lock")


def row(path, kind="file", size=0, target=""):
    return [path, kind, 0o444, 0, size, DIGESTS[0], target]


def test_the_reserve_of_the_disk_stays_free(host):
    host.disk = (30 * GIB, 200 * GIB)  # 10 GiB of it are the reserve
    begin(host, [row("a", size=20 * GIB)])
    with pytest.raises(OpError, match="has no room for a data set") as refused:
        begin(host, [row("a", size=20 * GIB + 1)], DIGESTS[1], "other", quota=100 * GIB)
    assert refused.value.kind == "no-space"
    assert len(names(host)) == 1


def test_sets_share_a_quarter_of_the_disk(host):
    begin(host, [row("a", size=30 * GIB)])
    with pytest.raises(OpError, match="the limit for all data sets is 51200 MiB"):
        begin(host, [row("a", size=21 * GIB)], DIGESTS[1], "other")


@pytest.mark.parametrize(
    "rows",
    [
        [row("../x")], [row("/etc/x")], [row("a//b")], [row("")], [row("a\0b")], [row("a"), row("a")],
        [row("a", "link", target="/etc"), row("a/passwd")], [row("a", "socket")], [row("missing/a")],
        [row("a", size=-1)],
    ],
)  # fmt: skip
def test_entries_that_no_folder_has_leave_nothing(host, rows):
    with pytest.raises((OpError, OSError)):
        begin(host, rows)
    data.drop(host.call, "t")
    assert names(host) == []


@pytest.mark.parametrize("content", [b"", b"x", zlib.compress(b"x"), zlib.compress(json.dumps([[1]]).encode())])
def test_entries_that_cannot_be_read(content):
    with pytest.raises(OpError) as refused:
        sets.unpacked(content)
    assert refused.value.kind == "corrupt"


@pytest.mark.parametrize("digest", ["../../x", "sha256:" + "A" * 64, "", "sha256:" + "1" * 63])
def test_a_digest_that_is_none_becomes_no_path(host, digest):
    for ask in (
        lambda: data.use(host.call, [digest]), lambda: data.evict(host.call, [digest]), lambda: begin(host, [], digest),
        lambda: list(data.manifest(host.call, digest, "entries")),
    ):  # fmt: skip
        with pytest.raises(OpError) as refused:
            ask()
        assert refused.value.kind == "bad-request"


def test_a_set_is_none_before_all_of_it_has_come(host):
    begin(host, [row("a", size=5)])
    with pytest.raises(OpError, match="has not arrived"):
        data.finish(host.call, "t")
    assert data.use(host.call, DIGESTS[:1]) == []
    assert data.list_sets(host.call) == {"sets": []}
    data.drop(host.call, "t")
    assert names(host) == []


@pytest.fixture
def arrived(host):
    """A set that is complete, and whose transfer has not ended: other hosts may still be receiving it."""
    begin(host, [])
    data.expect(Call(1, lambda *_: None, False, b""), "t", DIGESTS[0], DIGESTS[0])
    data.finish(host.call, "t")
    return data.folder_of_set(DIGESTS[0])


def end_transfer(host):
    """End it as a host does: its blobs are closed, then its set is dropped."""
    data._arriving["t"].blob.close()
    data.drop(host.call, "t")


def test_a_set_that_is_sent_stays_also_when_the_transfer_that_brought_it_ends(host, arrived):
    sent = data._served(host.call, DIGESTS[0], DIGESTS[0], b"")
    end_transfer(host)
    assert data.evict(host.call, DIGESTS[:1]) == {DIGESTS[0]: "the host receives or sends the data set now"}
    sent.close()
    assert data.evict(host.call, DIGESTS[:1]) == {} and names(host) == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_lock_that_cannot_be_had_is_no_lock(host, arrived, shared):
    end_transfer(host)
    other = os.open(f"{arrived}/{data.META}", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(OpError, match="another process") as refused:
        data.hold(arrived, shared)
    assert refused.value.kind == "conflict"
    os.close(other)
    os.close(data.hold(arrived, shared))
    assert not sets.is_held(arrived)


def test_two_sets_that_arrive_at_once_do_not_fill_the_disk(host):
    """The first has its files, but hardly any of their bytes."""
    host.disk = (30 * GIB, 200 * GIB)
    rows = [("f", "file", 0o444, 0, 12 * GIB, DIGESTS[5], "")]
    begin(host, rows, DIGESTS[0], "one")
    with pytest.raises(OpError) as caught:
        begin(host, rows, DIGESTS[1], "two")
    assert caught.value.kind == "no-space"


def test_bytes_of_an_arriving_set_that_are_written_count_once(host):
    host.disk = (12 * GIB, 200 * GIB)  # 2 GiB beyond the reserve
    begin(host, [("f", "file", 0o444, 0, 1 << 20, DIGESTS[5], "")], DIGESTS[0], "one")
    (arriving,) = names(host)
    (host.top / "data" / arriving / "tree/f").write_bytes(b"x" * (1 << 20))
    begin(host, [("f", "file", 0o444, 0, 2 * GIB - 4096, DIGESTS[5], "")], DIGESTS[1], "two")


def test_a_set_with_holes_needs_room_for_what_it_stores(host):
    """And later sets count it so, also where an older gpurun wrote no such number."""
    host.disk = (12 * GIB, 200 * GIB)  # 2 GiB beyond the reserve
    rows = [("f", "file", 0o444, 0, 16 * GIB, DIGESTS[5], "")]
    begin(host, rows, DIGESTS[0], "one", stored=17 << 20)
    with pytest.raises(OpError, match="has no room for a data set"):
        begin(host, rows, DIGESTS[1], "two")
    begin(host, rows, DIGESTS[1], "two", stored=GIB)
    with pytest.raises(OpError, match="has no room for a data set"):
        begin(host, rows, DIGESTS[2], "three", stored=GIB)
    assert [(one.size, one.taken) for one in sorted(data.sets())] == [(16 * GIB, 17 << 20), (16 * GIB, GIB)]
    (older,) = [
        name for name in names(host) if json.loads((host.top / "data" / name / "set.json").read_text())["stored"] == GIB
    ]
    (host.top / "data" / older / "set.json").write_text(json.dumps({"digest": DIGESTS[1], "bytes": 5, "files": 1}))
    assert {one.taken for one in data.sets()} == {17 << 20, 5}


def test_a_transfer_that_is_dropped_while_it_copies_writes_into_no_other_set(host, monkeypatch, tmp_path):
    """The head dropped it as it took too long. Its descriptors were closed, and then those of another set."""
    content = b"x" * data.LEAST_SEARCHED_BYTES
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    rows = [(name, "file", 0o444, 0, len(content), digest, "") for name in ("a", "b")]
    begin(host, rows[:1], DIGESTS[0], "first", store=CODE, direct=1 << 20)
    data.put(Call(1, lambda *_: None, False, frames.encode({"d": digest}, content)), "first")
    copies, dropped, blocks = threading.Event(), threading.Event(), data.blocks

    def slow(descriptor, size):
        copies.set()
        dropped.wait(5.0)
        yield from blocks(descriptor, size)

    monkeypatch.setattr(data, "blocks", slow)

    def copy():
        with contextlib.suppress(OSError, OpError):
            begin(host, rows, DIGESTS[1], "slow", store=CODE)

    copying = threading.Thread(target=copy)
    copying.start()
    assert copies.wait(5.0)
    dropping = threading.Thread(target=data.drop, args=(host.call, "slow"))
    dropping.start()
    dropping.join(0.5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/b").write_text("of another set")
    others = [os.open(tmp_path / "other", os.O_RDONLY) for _ in range(8)]
    dropped.set()
    copying.join(5.0)
    dropping.join(5.0)
    for descriptor in others:
        os.close(descriptor)
    assert (tmp_path / "other/b").read_text() == "of another set"
    assert sorted(os.listdir(host.top / "code")) == [".lock", DIGESTS[0][7:]]
