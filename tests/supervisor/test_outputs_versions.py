"""Hosts have files of one name: the same content counts once, other content is kept as NAME.HOST, and goes back."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from local_agents import Hosts
from outputs_world import outputs_job

from gpurun.errors import HostFailure
from gpurun.launch.launchers.direct import TORCHRUN
from gpurun.node.agent import frames
from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.remote.agent import Reply
from gpurun.supervisor.outputs import outputs
from gpurun.supervisor.outputs.arriving import ask_sums
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.listing import HostOutputs, Version, candidates, share
from gpurun.supervisor.outputs.outputs import collect_leaving, collect_outputs, copy_outputs, send_outputs


@pytest.fixture
def job(tmp_path):
    hosts = Hosts(tmp_path)
    yield outputs_job(tmp_path, hosts, "h1", "h2", "h3", launcher=TORCHRUN)
    hosts.close()


def write(job, host, name, text, at_s=None):
    path = job.host(host) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if at_s is not None:
        os.utime(path, (at_s, at_s))


def append(job, host, name, text):
    path = job.host(host) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def files(top):
    return {str(path.relative_to(top)): path.read_text() for path in sorted(top.rglob("*")) if path.is_file()}


def restart(job, *hosts):
    """End the attempt, and begin the next one on some hosts."""
    assert collect_outputs(job) == set()
    job.hosts = job.members = hosts
    send_outputs(job)
    return [files(job.host(host)) for host in hosts]


def taken_over(job):
    """Another supervisor takes the running gang over."""
    job.outputs = HeadCopy(job.folder)


def test_the_same_content_counts_once_and_travels_once(job, monkeypatch):
    for number, host in enumerate(job.hosts):
        write(job, host, "model", "m" * 2_000_000, 1_000_000 + number)
        write(job, host, "config", "c", 1_000_000 + number)
    asked = []
    for host in job.hosts:
        agent = job.links.agent(host)
        stream = agent.stream
        monkeypatch.setattr(
            agent, "stream", lambda op, s=stream, h=host, **options: asked.append((h, op)) or s(op, **options)
        )
    copy_outputs(job)
    copy_outputs(job)
    assert sorted(files(job.head)) == ["config", "model"] and not job.outputs.versions
    assert [host for host, op in asked if op == "outputs.read"] == ["h1"]
    assert [op for _, op in asked].count("outputs.sums") == 3, "it need not be compared again"
    assert collect_outputs(job) == set()
    assert sorted(files(job.head)) == ["config", "model"] and job.record.outputs_left is None and job.notes == []


def test_a_log_of_each_host_grows_in_place_over_restarts_and_take_overs(job):
    for host in job.hosts:
        append(job, host, "train.log", f"{host} 1\n")
    for _ in range(2):
        copy_outputs(job)
    assert files(job.head) == {
        "train.log": "h1 1\n", "train.log.h2": "h2 1\n", "train.log.h3": "h3 1\n",
    }  # fmt: skip
    assert restart(job, "h1", "h2", "h3") == [{"train.log": f"{host} 1\n"} for host in job.hosts]
    for number in (2, 3):
        for host in job.hosts:
            append(job, host, "train.log", f"{host} {number}\n")
        taken_over(job)
        copy_outputs(job)
        assert restart(job, *job.hosts) == [files(job.host(host)) for host in job.hosts]
    assert files(job.head) == {
        name: f"{host} 1\n{host} 2\n{host} 3\n"
        for name, host in {"train.log": "h1", "train.log.h2": "h2", "train.log.h3": "h3"}.items()
    }


def test_people_are_told_once_and_only_of_what_lasts(job):
    for host in job.hosts:
        write(job, host, "model", f"model of {host}")
    copy_outputs(job)
    assert list(job.outputs.keeper.notes()) == [], "ranks save one after the other"
    append(job, "h1", "other", "x")
    copy_outputs(job)
    append(job, "h1", "other", "x")
    copy_outputs(job)
    assert list(job.outputs.keeper.notes()) == [
        "hosts have different files of one name: the head keeps 'model' of h2 as 'model.h2', and renames 1 more"
    ]


def test_at_the_end_people_are_told(job):
    for host in job.hosts:
        write(job, host, "model", f"model of {host}")
    assert collect_outputs(job) == set()
    assert job.notes == [
        "hosts have different files of one name: the head keeps 'model' of h2 as 'model.h2', and renames 1 more"
    ]
    assert job.record.outputs_left is None


def test_a_host_that_was_not_there_gets_the_first_ones_and_its_log_is_its_own(job):
    for host in ("h1", "h2"):
        write(job, host, "train.log", f"of {host}")
    job.hosts = job.members = ("h1", "h2")
    assert restart(job, "h2", "h3") == [{"train.log": "of h2"}, {"train.log": "of h1"}]
    copy_outputs(job)
    assert files(job.head) == {"train.log": "of h2", "train.log.h1": "of h1"}, "nobody has changed anything"
    append(job, "h3", "train.log", ", of h3")
    copy_outputs(job)
    assert files(job.head) == {"train.log": "of h2", "train.log.h1": "of h1", "train.log.h3": "of h1, of h3"}
    assert restart(job, "h1", "h2") == [{"train.log": "of h2"}, {"train.log": "of h2"}], "h1 was away meanwhile"
    assert files(job.head)["train.log.h1"] == "of h1"
    assert files(job.head)["train.log.h3"] == "of h1, of h3", "a log stays after its host has gone"


def test_of_hosts_that_were_given_the_same_only_what_they_changed_counts(job):
    write(job, "h1", "model", "1")
    assert restart(job, "h1", "h2", "h3") == [{"model": "1"}] * 3
    taken_over(job)
    write(job, "h2", "model", "22")
    copy_outputs(job)
    assert files(job.head) == {"model": "22"}
    taken_over(job)
    copy_outputs(job)
    assert files(job.head) == {"model": "22"} and not job.outputs.versions


def test_once_hosts_have_the_same_again_there_is_one_file(job):
    write(job, "h1", "model", "step 2", 1_000_002)
    write(job, "h2", "model", "step 1", 1_000_001)
    copy_outputs(job)
    assert files(job.head) == {"model": "step 2", "model.h2": "step 1"}
    write(job, "h2", "model", "step 2", 1_000_003)
    copy_outputs(job)
    assert files(job.head) == {"model": "step 2"} and not job.outputs.versions


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_host_that_removes_its_file_removes_its_version(job, takes_over):
    for host in job.hosts:
        write(job, host, "model", f"of {host}")
    copy_outputs(job)
    if takes_over:
        restart(job, "h1", "h2", "h3")
        taken_over(job)
        append(job, "h3", "model", "+")
        copy_outputs(job)
    (job.host("h2") / "model").unlink()
    append(job, "h3", "model", "!")
    write(job, "h2", "other", "x")
    copy_outputs(job)
    there = files(job.host("h3"))["model"]
    assert files(job.head) == {"model": "of h1", "model.h3": there, "other": "x"}
    (job.host("h1") / "model").unlink()
    write(job, "h1", "other", "x")
    copy_outputs(job)
    assert files(job.head)["model"] == there and "model.h3" not in files(job.head)
    (job.host("h3") / "model").unlink()
    write(job, "h3", "other", "x")
    copy_outputs(job)
    assert files(job.head) == {"other": "x"}


def test_a_version_of_a_host_that_has_left_goes_with_the_path(job):
    for host in ("h1", "h2"):
        write(job, host, "step-1/rng", f"of {host}")
    restart(job, "h1", "h3")
    append(job, "h1", "step-1/rng", "!")
    copy_outputs(job)
    assert files(job.head) == {"step-1/rng": "of h1!", "step-1/rng.h2": "of h2"}
    for host in ("h1", "h3"):
        (job.host(host) / "step-1/rng").unlink()
        (job.host(host) / "step-1").rmdir()
        write(job, host, "step-2/rng", "2")
    copy_outputs(job)
    assert files(job.head) == {"step-2/rng": "2"}


def test_a_program_may_have_files_of_such_names(job):
    write(job, "h1", "log", "of h1")
    write(job, "h2", "log", "of h2")
    write(job, "h1", "log.h2", "a program's")
    copy_outputs(job)
    assert files(job.head) == {"log": "of h1", "log.h2": "a program's", "log.h2.2": "of h2"}
    assert restart(job, "h1", "h2") == [
        {"log": "of h1", "log.h2": "a program's"}, {"log": "of h2", "log.h2": "a program's"},
    ]  # fmt: skip
    write(job, "h1", "log.h2.2", "a program's, too")
    copy_outputs(job)
    assert files(job.head) == {
        "log": "of h1", "log.h2": "a program's", "log.h2.2": "a program's, too", "log.h2.3": "of h2",
    }  # fmt: skip


def test_a_program_takes_the_name_of_a_version_of_a_host_that_has_left(job):
    for host in ("h1", "h2"):
        write(job, host, "log", f"of {host}")
    restart(job, "h1")
    write(job, "h1", "log.h2", "a program's")
    copy_outputs(job)
    assert files(job.head) == {"log": "of h1", "log.h2": "a program's", "log.h2.2": "of h2"}
    assert restart(job, "h2") == [{"log": "of h2", "log.h2": "a program's"}]


def test_links_and_modes(job):
    for host, to in (("h1", "step-2"), ("h2", "step-1"), ("h3", "step-2")):
        (job.host(host) / "latest").symlink_to(to)
        write(job, host, "run.sh", "x", 1_000_000)
    (job.host("h2") / "run.sh").chmod(0o700)
    copy_outputs(job)
    assert {path.name: str(path.readlink()) for path in job.head.iterdir() if path.is_symlink()} == {
        "latest": "step-2", "latest.h2": "step-1",
    }  # fmt: skip
    assert files(job.head) == {"run.sh": "x"}, "a mode is no content"
    (job.host("h2") / "latest").unlink()
    copy_outputs(job)
    assert sorted(path.name for path in job.head.iterdir()) == ["latest", "run.sh"]
    (job.host("h2") / "latest").symlink_to("step-1")
    restart(job, "h2", "h3")
    assert [str((job.host(host) / "latest").readlink()) for host in ("h2", "h3")] == ["step-1", "step-2"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "\udcff" * 255, "a b\n$(x)'\"", "x.h2"], ids=range(5))
def test_names_of_any_length_and_bytes(job, name):
    for host in ("h1", "h2"):
        write(job, host, name, f"of {host}")
    copy_outputs(job)
    found = files(job.head)
    assert found.pop(name) == "of h1"
    ((other, text),) = found.items()
    assert text == "of h2" and other.endswith(".h2") and len(os.fsencode(other)) <= 255
    assert restart(job, "h2", "h1") == [{name: "of h2"}, {name: "of h1"}]


@pytest.mark.parametrize("host", ["h2", "gpu-r1-02.cluster.example.org", "h" * 253, "é" * 100])
@pytest.mark.parametrize("path", ["log", "n" * 255, f"{'d' * 200}/{'é' * 127}"])
def test_candidates_differ_and_fit(path, host):
    names = [name for name, _ in zip(candidates(path, host), range(1000), strict=False)]
    assert len(set(names)) == 1000 and path not in names
    assert all(len(name.rpartition("/")[2].encode()) <= 255 for name in names)
    assert {name.rpartition("/")[0] for name in names} == {path.rpartition("/")[0]}


def test_two_hosts_of_one_long_beginning_get_two_names():
    one, two = "h" * 100 + "1", "h" * 100 + "2"
    said = [
        HostOutputs(host, {"n" * 255: Listed("n" * 255, "file", size=size, mark=(size, size))})
        for size, host in enumerate(["first", one, two])
    ]
    shares = share({}, said, {})
    assert len({name for entries in shares.hosts.values() for name in entries}) == 3
    assert sorted(version.host for version in shares.versions.values()) == ["first", one, two]


def test_a_version_that_does_not_fit_stays_on_its_host_and_is_named(job):
    job.outputs = HeadCopy(job.folder, 1 << 20)
    for host in ("h1", "h2"):
        write(job, host, "model", host * 400_000)
    assert collect_outputs(job) == {"h2"}
    assert list(files(job.head)) == ["model"]
    assert job.record.outputs_left.first == ("'model' does not fit: outputs_limit is 1 MiB",)
    assert files(job.host("h2")) == {"model": "h2" * 400_000}


def test_the_same_content_of_two_hosts_needs_room_for_one(job):
    job.outputs = HeadCopy(job.folder, 1 << 20)
    for number, host in enumerate(("h1", "h2")):
        write(job, host, "model", "m" * 800_000, 1_000_000 + number)
    assert collect_outputs(job) == set() and job.record.outputs_left is None


@pytest.mark.parametrize("name", ["outputs.versions", "outputs.given"])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"log.h2": 1}', '{"log.h2": ["h2"]}', '{"hosts": 1}', "\x00" * 100, "[" * 100_000],
    ids=range(8),
)
def test_damaged_knowledge_loses_nothing(job, name, text):
    for host in ("h1", "h2"):
        write(job, host, "log", f"of {host}")
    restart(job, "h1", "h2")
    (job.folder.path.plain / name).write_text(text)
    taken_over(job)
    for host in ("h1", "h2"):
        append(job, host, "log", "!")
    copy_outputs(job)
    assert {"of h1!", "of h2!"} <= set(files(job.head).values())
    assert restart(job, "h1")[0]["log"] == "of h1!"


def test_a_host_that_was_lost_adds_its_version(job):
    """The job has ended; the host answers again."""
    said = [HostOutputs("h2", {"log": Listed("log", "file", 0, 5, 7, (5, 1))})]
    there = {"log": Listed("log", "file", 0, 9, 8, (9, 2))}
    shares = share(there, said, {}, late=True)
    assert shares.versions == {"log.h2": Version("h2", "log")} and list(shares.hosts["h2"]) == ["log.h2"]
    known = {"log": Version("h1", "log"), "log.h2": Version("h2", "log")}
    there |= {"log.h2": Listed("log.h2", "file", 0, 3, 3, (3, 3))}
    shares = share(there, said, {}, versions=known, late=True)
    assert shares.versions == known and list(shares.hosts["h2"]) == ["log.h2"] and "log" in shares.stay


def test_ranks_of_an_elastic_gang_move_so_the_newest_has_the_name_and_all_get_it(tmp_path):
    hosts = Hosts(tmp_path)
    job = outputs_job(tmp_path, hosts, "h1", "h2", launcher=TORCHRUN, elastic=True)
    write(job, "h1", "model", "step 5", 1_000_000)
    write(job, "h2", "model", "step 10", 2_000_000)
    copy_outputs(job)
    assert files(job.head) == {"model": "step 10", "model.h1": "step 5"}
    job.members = ("h2",)
    assert collect_leaving(job, ["h1"]) == []
    assert files(job.head) == {"model": "step 10", "model.h1": "step 5"}
    job.members = ("h1", "h2")
    assert restart(job, "h1", "h2") == [{"model": "step 10"}] * 2
    copy_outputs(job)
    assert files(job.head) == {"model": "step 10", "model.h1": "step 5"}
    write(job, "h1", "model", "step 15", 3_000_000)
    copy_outputs(job)
    assert files(job.head) == {"model": "step 15"} | {"model.h2": "step 10"}
    hosts.close()


def test_a_whole_copy_holds_versions_and_a_restart_gets_them(job, own_copy):
    """The logs of all hosts come home as they are; the rest is one whole state."""
    clock = SimpleNamespace(now_s=1000.0)
    own_copy(outputs, "time", monotonic=lambda: clock.now_s, sleep=lambda _: None)
    job.hosts = job.members = ("h1", "h2")
    for host in job.hosts:
        write(job, host, "rng", f"1 of {host}")
    for number in range(8):
        for host in job.hosts:
            append(job, host, "train.log", f"{host} {number}\n")
        clock.now_s += 60
        copy_outputs(job)
    assert "the job changes 'train.log', 'train.log.h2' all the time" in "".join(job.outputs.keeper.notes())
    for host in job.hosts:
        write(job, host, "rng", f"half of 2 of {host}")
    write(job, "h1", "rng.h2", "a program's")
    clock.now_s += 60
    copy_outputs(job)
    assert files(job.head)["rng.h2"] == "a program's"
    job.links.silent = {"h2"}
    collect_outputs(job)
    job.links.silent = set()
    taken_over(job)
    send_outputs(job)
    for host in job.hosts:
        log = "".join(f"{host} {number}\n" for number in range(8))
        assert files(job.host(host)) == {"rng": f"1 of {host}", "train.log": log}


GOOD = {"n": 0, "marks": [3, 5, 6, 7], "sha": "0" * 64}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([GOOD], {("h1", "log"): (GOOD["marks"], GOOD["sha"])}),
        ([{"n": 0}, {"n": 0}, GOOD], {("h1", "log"): (GOOD["marks"], GOOD["sha"])}),
        ([{"n": 0, "marks": []}], {}),
        ([{**GOOD, "sha": 7}], {}),
        ([{**GOOD, "marks": {}}], {}),
        ([], "0 of 1 digests"),
        ([{"n": 1}], "damaged"),
        ([{**GOOD, "n": "0"}], "damaged"),
        ([GOOD, GOOD], "damaged"),
        ([{}], "damaged"),
        ([b"no frame, but bytes"], "damaged"),
    ],
)
def test_digests_of_a_host_that_lies(said, found):
    def stream(*_args, **_options):
        for header in said:
            yield Reply(None, header if isinstance(header, bytes) else frames.encode(header))

    agents = {"h1": SimpleNamespace(stream=stream)}
    if isinstance(found, str):
        with pytest.raises(HostFailure, match=found):
            ask_sums(agents, {"h1": ["log"]}, "j-00000001", force=False)
    else:
        assert ask_sums(agents, {"h1": ["log"]}, "j-00000001", force=False) == found


def test_a_host_that_cannot_be_compared_keeps_no_other_from_coming(job, monkeypatch):
    for host in job.hosts:
        write(job, host, "log", f"of {host}")
    agent = job.links.agent("h2")
    stream = agent.stream

    def fails(op, **options):
        if op == "outputs.sums":
            raise HostFailure("it hangs", host="h2")
        return stream(op, **options)

    monkeypatch.setattr(agent, "stream", fails)
    assert collect_outputs(job) == {"h2"}
    assert files(job.head) == {"log": "of h1", "log.h3": "of h3"}
    assert files(job.host("h2")) == {"log": "of h2"} and job.record.outputs_left.first == ("h2: it hangs",)


def test_a_version_that_its_host_changed_during_a_copy_and_then_removed_is_gone(job, monkeypatch):
    for host in job.hosts:
        write(job, host, "log", f"of {host}")
    copy_outputs(job)
    append(job, "h2", "log", "!")
    agent = job.links.agent("h2")
    stream = agent.stream

    def changes(op, **options):
        if op == "outputs.read":
            return (Reply(None, piece) for piece in [frames.encode({"n": 0, "gone": CHANGING})])
        return stream(op, **options)

    with monkeypatch.context() as patch:
        patch.setattr(agent, "stream", changes)
        copy_outputs(job)
    assert files(job.head)["log.h2"] == "of h2", "the older content stays"
    (job.host("h2") / "log").unlink()
    write(job, "h2", "other", "x")
    copy_outputs(job)
    assert files(job.head) == {"log": "of h1", "log.h3": "of h3", "other": "x"}


def test_a_host_that_comes_back_gets_what_the_others_have_written_since_and_not_its_older_checkpoint(job):
    """PyTorch's tutorial saves on each host: a rank began at step 16, and the others at 32."""
    job.hosts = job.members = ("h1", "h2")
    for host, text in (("h1", "a16"), ("h2", "b16")):
        write(job, host, "snapshot", text)
    restart(job, "h1", "h3")
    for host, text in (("h1", "a32"), ("h3", "c32")):
        write(job, host, "snapshot", text)
    copy_outputs(job)
    taken_over(job)
    there = restart(job, "h2", "h3")
    assert there == [{"snapshot": "a32"}, {"snapshot": "c32"}]
    write(job, "h2", "snapshot", "b48")
    write(job, "h3", "snapshot", "c48")
    copy_outputs(job)
    kept = files(job.head)
    assert kept["snapshot"] == "b48" and kept["snapshot.h3"] == "c48" and {"b16", "a32"} <= {*kept.values()}, kept
    there = restart(job, "h1", "h2")
    assert there == [{"snapshot": "b48"}, {"snapshot": "b48"}]
