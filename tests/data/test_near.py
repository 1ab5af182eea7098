"""Where a job's data are known to be, its gang goes, if nothing else tells the hosts apart."""

from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import DataSource, Wants
from gpurun.scheduler.model import gang_of, gangs_of
from gpurun.state import caches

ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def test_what_a_host_says_replaces_what_was_known(monkeypatch):
    caches.note_sites(ONE, has=["h0", "h1"], source="/a")
    caches.note_sites(TWO, has=["h1", "h2"])
    assert caches.holders() == {ONE: {"h0", "h1"}, TWO: {"h1", "h2"}}
    caches.note_sites(ONE, has=["h3"], lacks=["h0", "never"])
    assert caches.hosts_of(ONE) == {"h1", "h3"}
    assert caches.known()[ONE].source == "/a"
    assert caches.hosts_of("sha256:none") == frozenset()


def test_a_damaged_record_is_no_record(tmp_path):
    caches.note_sites(ONE, has=["h0"])
    for file in (tmp_path / "head-cache/gpurun/data").iterdir():
        file.write_bytes(b"{}")
    assert caches.known() == {}
    caches.note_sites(ONE, has=["h1"])
    assert caches.hosts_of(ONE) == {"h1"}


def wanting(*digests):
    sources = (DataSource("folder" if digest else "host", "/data", digest) for digest in digests)
    return Wants(data={f"set{number}": source for number, source in enumerate(sources)})


def test_a_gang_is_near_hosts_that_have_all_of_its_data():
    record = JobRecord("j-00000001", "n", "me", 1, "i", 1, State.QUEUED, 0.0, 0.0)
    holders = {ONE: frozenset({"h0", "h1"}), TWO: frozenset({"h1", "h2"})}
    near = [gang_of(record, wanting(*digests), holders).near for digests in ((), (None,), (ONE,), (ONE, TWO))]
    assert near == [frozenset(), frozenset(), {"h0", "h1"}, {"h1"}]
    assert gang_of(record, wanting("sha256:none"), holders).near == frozenset()
    assert next(gangs_of([(record, wanting(ONE))])).near == frozenset()
