"""Each rank of a gang may write outputs: what any host has comes home, and every host that reads it gets it back."""

from __future__ import annotations

import os

import pytest
from local_agents import Hosts
from outputs_world import outputs_job, shape

from gpurun.errors import HostFailure
from gpurun.jobs.record import OutputsLeft
from gpurun.launch.launchers.direct import TASKS, TORCHRUN
from gpurun.launch.launchers.horovod import GLOO, MPI
from gpurun.launch.launchers.mpirun import MPIRUN
from gpurun.node.folder.contents import Listed
from gpurun.supervisor.outputs.listing import HostOutputs, share
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs, send_outputs
from gpurun.supervisor.outputs.plan import plan_copy


@pytest.fixture
def job(tmp_path):
    hosts = Hosts(tmp_path)
    yield outputs_job(tmp_path, hosts, "h1", "h2", launcher=TORCHRUN)
    hosts.close()


def write(job, host, name, text, at_s=1_000_000.0):
    path = job.host(host) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def files(top):
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def test_shards_of_all_hosts_come_home_and_go_back_to_all(job):
    write(job, "h1", "step-10/rank0.pt", "0")
    write(job, "h2", "step-10/rank1.pt", "1")
    copy_outputs(job)
    assert files(job.head) == {"step-10/rank0.pt": "0", "step-10/rank1.pt": "1"}
    assert collect_outputs(job) == set() and not job.host("h1").exists() and not job.host("h2").exists()
    send_outputs(job)
    assert shape(job.host("h1")) == shape(job.host("h2")) == shape(job.head)
    write(job, "h2", "step-20/rank1.pt", "1")
    assert collect_outputs(job) == set()
    assert sorted(files(job.head)) == ["step-10/rank0.pt", "step-10/rank1.pt", "step-20/rank1.pt"]


@pytest.mark.parametrize(
    ("launcher", "reads"), [(TASKS, True), (TORCHRUN, True), (MPIRUN, True), (GLOO, False), (MPI, False)]
)
def test_horovods_rank_0_alone_reads_what_there_was(tmp_path, launcher, reads):
    hosts = Hosts(tmp_path)
    job = outputs_job(tmp_path, hosts, "h1", "h2", launcher=launcher)
    job.head.mkdir()
    (job.head / "model").write_text("m")
    send_outputs(job)
    assert [(job.host(host) / "model").exists() for host in ("h1", "h2")] == [True, reads]
    hosts.close()


def test_of_a_file_that_all_write_the_first_ranks_has_the_name(job):
    for name, ages in {"log": (1, 2), "same": (1, 1), "first": (2, 1)}.items():
        for host, age in zip(("h1", "h2"), ages, strict=True):
            write(job, host, name, host, 1_000_000.0 + age)
    copy_outputs(job)
    there = {name + ending: host for name in ("log", "same", "first") for ending, host in (("", "h1"), (".h2", "h2"))}
    assert files(job.head) == there
    assert collect_outputs(job) == set()
    assert files(job.head) == there


def test_what_its_writer_removes_does_not_come_back_from_a_host_that_was_given_it(job):
    """A rotation of checkpoints: the host that wrote one removes it; the others have it from the last attempt."""
    job.head.mkdir()
    (job.head / "step-1").write_text("1")
    send_outputs(job)
    copy_outputs(job)
    assert files(job.head) == {"step-1": "1"}
    (job.host("h1") / "step-1").unlink()
    write(job, "h1", "step-2", "2")
    copy_outputs(job)
    assert files(job.head) == {"step-2": "2"}
    assert collect_outputs(job) == set()
    assert files(job.head) == {"step-2": "2"}


def test_what_a_host_has_changed_of_a_removed_file_comes(job):
    job.head.mkdir()
    (job.head / "log").write_text("1")
    send_outputs(job)
    copy_outputs(job)
    (job.host("h1") / "log").unlink()
    write(job, "h2", "log", "12")
    copy_outputs(job)
    assert files(job.head) == {"log": "12"}


@pytest.mark.parametrize("silent", ["h1", "h2"])
def test_of_a_silent_host_what_it_gave_stays_and_the_others_are_brought(job, silent):
    for host in ("h1", "h2"):
        write(job, host, host, "1")
    copy_outputs(job)
    other = "h1" if silent == "h2" else "h2"
    write(job, other, other, "2", 2_000_000.0)
    job.links.silent = {silent}
    assert collect_outputs(job) == {silent}
    assert files(job.head) == {silent: "1", other: "2"}
    assert job.record.outputs_left == OutputsLeft(
        1, (f"{silent}: did not answer, so this host may have newer outputs",), (silent,)
    )
    assert job.host(silent).exists() and not job.host(other).exists()


def test_a_host_that_fails_in_a_copy_holds_up_no_other(job, monkeypatch):
    for host in ("h1", "h2"):
        write(job, host, host, "1")

    def fails(*_args, **_options):
        raise HostFailure("its disk is broken", host="h1")

    with monkeypatch.context() as patch:
        patch.setattr(job.links.agent("h1"), "stream", fails)
        with pytest.raises(HostFailure, match="its disk is broken"):
            copy_outputs(job)
    assert files(job.head) == {"h2": "1"}
    copy_outputs(job)
    assert files(job.head) == {"h1": "1", "h2": "1"}


def entry(path, mtime_ns=1, kind="file", size=1):
    return Listed(path=path, kind=kind, size=size, mtime_ns=mtime_ns, mark=(len(path), hash(path)))


def planned_copy(old, said, origins=None, *, late=False, **known):
    shares = share(old, said, origins or {}, late=late, **known)
    return plan_copy(old, said, origins or {}, shares, known.get("given", {}), onto=True, late=late)


def planned(*hosts, old=(), origins=None, **options):
    said = [HostOutputs(host, {each.path: each for each in entries}) for host, entries in hosts]
    plan = planned_copy({each.path: each for each in old}, said, origins, **options)
    return {**dict.fromkeys(plan.kept, ""), **{each.path: host for host, all_ in plan.fetched.items() for each in all_}}


def test_late_hosts_replace_nothing_that_is_newer():
    """A host was lost and the gang went on elsewhere: what it alone has comes, what others have written since stays."""
    there = ("h1", [entry("model", 5), entry("alone", 1)])
    assert planned(there, old=[entry("model", 9)], late=True) == {"model": "", "model.h1": "h1", "alone": "h1"}
    assert planned(there, old=[entry("model", 3)], late=True) == {"model": "h1", "alone": "h1"}
    assert planned(there, old=[entry("model", 9)], late=False) == {"model": "h1", "alone": "h1"}


@pytest.mark.parametrize("age", [1, 9])
def test_a_folder_on_one_host_is_taken_before_a_file_on_another(age):
    one, two = ("h1", [entry("it", 5, "dir"), entry("it/below")]), ("h2", [entry("it", age)])
    assert planned(one, two) == planned(two, one) == {"it/below": "h1"}


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("newer", ["h1", "h2"])
def test_a_folder_where_another_host_has_a_link_or_file_comes_and_the_other_stays_and_is_said(job, kind, newer):
    """Once the folder's content was dropped, and removed from its host, without a word."""
    write(job, "h1", "best/model.pt", "five gigabytes")
    write(job, "h2", "step-900/shard", "x")
    if kind == "link":
        (job.host("h2") / "best").symlink_to("step-900")
    else:
        write(job, "h2", "best", "a file")
    os.utime(job.host(newer) / "best", (2_000_000, 2_000_000), follow_symlinks=False)
    (left,) = copy_outputs(job)
    assert left.words == "'best' stays on its host, because a folder on another host has the same name"
    assert collect_outputs(job) == {"h2"}
    assert files(job.head) == {"best/model.pt": "five gigabytes", "step-900/shard": "x"}
    assert not job.host("h1").exists() and os.path.lexists(job.host("h2") / "best")
    assert job.record.outputs_left.hosts == ("h2",)
    send_outputs(job)
    assert files(job.host("h1")) == files(job.head)


def test_what_a_lost_host_has_in_the_place_of_a_newer_file_stays_there_and_is_said(job):
    there = HostOutputs("h1", {each.path: each for each in [entry("it", 5, "dir"), entry("it/below")]})
    plan = planned_copy({"it": entry("it", 9)}, [there], late=True)
    assert [(each.host, each.path, each.no_room) for each in plan.unfit] == [("h1", "it/below", False)]
    assert plan.kept == ["it"]


def test_a_restart_sends_nothing_in_the_place_of_a_hosts_folder(job):
    job.head.mkdir()
    (job.head / "best").symlink_to("step-900")
    write(job, "h2", "best/model.pt", "only here")
    send_outputs(job)
    assert (job.host("h1") / "best").is_symlink()
    assert files(job.host("h2")) == {"best/model.pt": "only here"}
