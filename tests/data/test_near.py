"""Where a job's data are known to be, its gang goes, if nothing else tells the hosts apart."""

from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import DataSource, Wants
from gpurun.jobs.states import State
from gpurun.scheduler.gangs import gang_of, gangs_of
from gpurun.state import data_sites

ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def test_what_a_host_says_replaces_what_was_known(monkeypatch):
    data_sites.note(ONE, has=["h0", "h1"], source="/a")
    data_sites.note(TWO, has=["h1", "h2"])
    assert data_sites.holders() == {ONE: {"h0", "h1"}, TWO: {"h1", "h2"}}
    data_sites.note(ONE, has=["h3"], lacks=["h0", "never"])
    assert data_sites.hosts_of(ONE) == {"h1", "h3"}
    assert data_sites.known()[ONE].source == "/a"
    assert data_sites.hosts_of("sha256:none") == frozenset()


def test_a_damaged_record_is_no_record(tmp_path):
    data_sites.note(ONE, has=["h0"])
    for file in (tmp_path / "head-cache/gpurun/data").iterdir():
        file.write_bytes(b"{}")
    assert data_sites.known() == {}
    data_sites.note(ONE, has=["h1"])
    assert data_sites.hosts_of(ONE) == {"h1"}


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
