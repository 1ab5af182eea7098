"""The head keeps the last whole copy of outputs, and a restart gets exactly that. Real agents on this machine."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
from outputs_programs import Declared, InPlace, Renamed, VirtualTime
from outputs_world import JOB, outputs_job, shape

from gpurun.cli.jobs import whole_json, whole_text
from gpurun.errors import HostFailure
from gpurun.jobs.folder import measure
from gpurun.launch.launchers.direct import TORCHRUN
from gpurun.node.folder import below
from gpurun.supervisor.outputs import keeping, outputs
from gpurun.supervisor.outputs import outputs as outputs_watch
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.outputs import OutputsWatch, collect_outputs, copy_outputs, send_outputs

MIB = 1 << 20


@pytest.fixture
def clock(own_copy):
    made = SimpleNamespace(now_s=1000.0)
    own_copy(outputs, "time", monotonic=lambda: made.now_s, sleep=lambda _: None)
    return made


@pytest.fixture
def job(tmp_path, world, clock):
    return outputs_job(tmp_path, world, "h1", "h2", launcher=TORCHRUN)


def put(top, **files):
    for name, text in files.items():
        (top / name).write_text(text)


def look(job, clock, after_s=5.0):
    clock.now_s += after_s
    copy_outputs(job)


def newest(job):
    """Return the folder of the newest generation."""
    tops = list((job.folder.path.plain / "outputs.whole").glob("[0-9]*"))
    assert len(tops) <= 1
    return tops[0] / "outputs" if tops else None


def texts(top):
    return {str(path.relative_to(top)): path.read_text() for path in sorted(top.rglob("*")) if path.is_file()}


def lose(job, host):
    """End the attempt with a host that does not answer; its folder stays as it is."""
    job.links.silent = {host}
    collect_outputs(job)
    job.links.silent = set()


def test_a_copy_that_rested_is_kept_as_links_and_a_torn_one_beside_it(job, clock):
    put(job.host("h1"), model="1", latest="1")
    put(job.host("h2"), shard="1")
    look(job, clock)
    assert newest(job) is None
    look(job, clock)
    assert texts(newest(job)) == texts(job.head) == {"latest": "1", "model": "1", "shard": "1"}
    assert (newest(job) / "model").samefile(job.head / "model")
    put(job.host("h1"), model="half of 2")
    look(job, clock)
    assert texts(job.head)["model"] == "half of 2" and texts(newest(job))["model"] == "1"


def test_a_restart_gets_the_whole_copy_and_nothing_besides(job, clock):
    put(job.host("h1"), model="1", latest="1")
    put(job.host("h2"), shard="1")
    look(job, clock), look(job, clock)
    put(job.host("h1"), model="2", latest="2", new="2")
    (job.host("h1") / "shard").unlink(missing_ok=True)
    look(job, clock)
    lose(job, "h2")
    put(job.host("h2"), later="of a host that came back")
    send_outputs(job)
    for host in ("h1", "h2"):
        assert texts(job.host(host)) == texts(job.head) == {"latest": "1", "model": "1", "shard": "1"}
    send_outputs(job)  # its supervisor died; the next one begins again
    assert texts(job.host("h2")) == {"latest": "1", "model": "1", "shard": "1"}


def test_a_gang_that_ended_whole_is_given_its_last_state(job, clock):
    put(job.host("h1"), model="1")
    look(job, clock), look(job, clock)
    assert newest(job) is not None
    put(job.host("h1"), model="2")
    assert collect_outputs(job) == set()
    assert not (job.folder.path.plain / "outputs.whole").exists()
    send_outputs(job)
    assert texts(job.host("h2")) == {"model": "2"}


def test_what_an_attempt_began_with_is_whole_until_there_is_something_newer(job, clock):
    """The attempt before ended whole, so nothing was kept beside its last state; this one's first copy is torn."""
    put(job.host("h1"), model="1")
    assert collect_outputs(job) == set()
    send_outputs(job)
    assert texts(newest(job)) == {"model": "1"}
    put(job.host("h1"), model="half of 2")
    look(job, clock)
    assert texts(job.head) == {"model": "half of 2"}
    lose(job, "h2")
    send_outputs(job)
    assert texts(job.host("h2")) == {"model": "1"}


def test_outputs_that_did_not_all_come_home_are_not_whole(job, clock):
    put(job.host("h1"), model="1")
    lose(job, "h2")
    assert job.record.outputs_left is not None
    send_outputs(job)
    assert newest(job) is None


def test_without_a_whole_copy_a_restart_gets_the_last_one(job, clock):
    put(job.host("h1"), model="1")
    look(job, clock)
    lose(job, "h2")
    send_outputs(job)
    assert texts(job.host("h2")) == {"model": "1"}


def test_a_log_comes_home_and_goes_back_as_it_last_came(job, clock):
    put(job.host("h1"), model="1")
    for number in range(8):
        with (job.host("h1") / "train.log").open("a") as log:
            log.write(f"{number}\n")
        look(job, clock, 60)
    assert texts(newest(job)) == {"model": "1"}
    assert texts(job.head)["train.log"].endswith("6\n7\n")
    put(job.host("h1"), model="half of 2")
    with (job.host("h1") / "train.log").open("a") as log:
        log.write("8\n")
    look(job, clock)
    lose(job, "h2")
    send_outputs(job)
    assert texts(job.host("h2")) == {"model": "1", "train.log": "".join(f"{number}\n" for number in range(9))}


def test_names_links_modes_and_holes_are_kept_as_they_are(job, clock):
    top = job.host("h1")
    (top / "ro").mkdir()
    put(top / "ro", file="x")
    (top / os.fsdecode(b"caf\xe9 '\n$(x)")).write_text("no UTF-8")
    (top / "up").symlink_to("../../../etc/passwd")
    os.link(top / "ro/file", top / "twin")
    (top / "secret").write_text("s")
    (top / "secret").chmod(0)
    with (top / "sparse").open("wb") as file:
        file.truncate(96 * MIB)
    (top / "ro").chmod(0o555)
    look(job, clock), look(job, clock)
    assert shape(newest(job)) == shape(job.head) == shape(top)
    there = shape(top)
    (top / "ro").chmod(0o755)
    put(top / "ro", file="y")
    (top / "up").unlink()
    put(top, up="a file now")
    look(job, clock)
    lose(job, "h2")
    send_outputs(job)
    assert shape(job.head) == shape(job.host("h2")) == there


class PowerCut(BaseException):
    pass


CALLS = ("rename", "link", "mkdir", "unlink", "rmdir", "symlink", "fsync")


@pytest.fixture
def cut_at(monkeypatch):
    """Runs something until its nth change of the disk. Returns whether it came so far."""

    def run(number, act):
        seen = 0

        def call(real, *args, **options):
            nonlocal seen
            seen += 1
            if seen == number:
                raise PowerCut
            return real(*args, **options)

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, partial(call, getattr(os, name)))
            try:
                act()
            except PowerCut:
                return True
        return False

    return run


def test_a_crash_at_any_moment_leaves_one_whole_generation(tmp_path, job, clock, cut_at):
    """While the first is made, while it is replaced, while it is given back, and while it is removed."""
    folder = job.folder.path.plain
    first, second = {"a": "1", "b": "1"}, {"a": "2", "c": "2"}
    put(job.head if job.head.exists() else _made(job.head), **first)
    home = os.open(folder, os.O_RDONLY)
    for number in range(1, 200):
        keeping.forget_generations(home)
        _replace(job.head, first)
        keeping.keep_generation(home, folder, keeping.About(1.0, 1))
        _replace(job.head, second)
        went_on = cut_at(number, lambda: keeping.keep_generation(home, folder, keeping.About(2.0, 2)))
        found = keeping.newest(home)
        whole = texts(folder / f"outputs.whole/{found[0]}/outputs")
        assert whole == {1: first, 2: second}[found[1].step], number
        _replace(job.head, {"torn": "3", "a": "half"})
        went_on |= cut_at(number, lambda: HeadCopy(job.folder).restore())
        assert HeadCopy(job.folder).restore()
        assert texts(job.head) == whole, number
        went_on |= cut_at(number, lambda: keeping.forget_generations(home))
        found = keeping.newest(home)
        assert found is None or texts(folder / f"outputs.whole/{found[0]}/outputs") == whole
        if not went_on:
            break
    os.close(home)
    assert number > 15 and not went_on


def _made(folder):
    folder.mkdir()
    return folder


def _replace(top, files):
    """As gpurun changes the copy: no file in place."""
    for path in top.iterdir():
        path.unlink()
    put(top, **files)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.ENOSPC])
def test_a_disk_that_makes_no_links_stops_no_copy_and_is_said(job, clock, monkeypatch, number):
    def fails(*_args, **_options):
        raise OSError(number, os.strerror(number))

    put(job.host("h1"), model="1")
    look(job, clock)
    monkeypatch.setattr(os, "link", fails)
    look(job, clock)
    assert newest(job) is None and texts(job.head) == {"model": "1"}
    assert job.outputs.keeper.notes() == [f"the head could not keep a whole copy of the outputs: {os.strerror(number)}"]


@pytest.mark.parametrize("about", ["", "{", "[]", '{"at_s": "x"}', '{"at_s": 1, "step": [], "logs": 7}', "[" * 9999])
def test_a_damaged_description_gives_back_the_files(job, clock, about):
    put(job.host("h1"), model="1")
    look(job, clock), look(job, clock)
    (newest(job).parent / "about.json").write_text(about)
    put(job.host("h1"), model="2")
    look(job, clock)
    assert job.outputs.restore() and texts(job.head) == {"model": "1"}


def test_a_limit_holds_for_copy_and_whole_copy_together(tmp_path, world, clock):
    job = outputs_job(tmp_path, world, "h1")
    job.outputs = HeadCopy(job.folder, 3 * MIB)
    put(job.host(), model="1" * 2 * MIB)
    look(job, clock), look(job, clock)
    assert newest(job) is not None
    put(job.host(), model="2" * 2 * MIB)
    look(job, clock)
    assert newest(job) is None and texts(job.head)["model"][0] == "2"
    assert job.outputs.keeper.notes() == [
        "gpurun removed the last whole copy of the outputs, because the newest outputs need its disk space"
    ]
    look(job, clock)
    assert newest(job) is not None, "links alone take no room"


def test_a_whole_copy_costs_nothing_until_files_are_replaced_and_counts_as_outputs(job, clock):
    put(job.host("h1"), model="1" * MIB)
    look(job, clock), look(job, clock)
    assert keeping.beside(job.folder.path) < 64 << 10
    put(job.host("h1"), model="2" * MIB)
    look(job, clock)
    assert MIB <= keeping.beside(job.folder.path) < MIB + (64 << 10)
    assert measure(job.folder.path).sizes["outputs"] >= 2 * MIB


def run_program(job, program, virtual, own_copy, *, top):
    own_copy(outputs, "time", monotonic=virtual.monotonic, sleep=lambda _: None)
    own_copy(outputs_watch, "time", monotonic=virtual.monotonic)
    job.spec.outputs_every_s = 60.0
    OutputsWatch(job, virtual)._follow()


def test_a_program_that_never_rests_is_told_once_and_its_last_whole_copy_stays(tmp_path, world, own_copy):
    job, program = outputs_job(tmp_path, world, "h1", launcher=TORCHRUN), InPlace()

    def rests_at_first():
        yield from _until(program.run([job.host()], 20), 130)
        yield from program.run([job.host()], 2, step=100)

    virtual = VirtualTime(rests_at_first(), 900)
    run_program(job, program, virtual, own_copy, top=job.host())
    assert [note for note in job.notes if "changes at least" in note] == [
        "some output changes at least every 5s, so the head has no whole copy of the newest outputs: call"
        " gpurun_runtime.checkpointed(step) after each save, or save less often"
    ]
    assert job.outputs.restore() and program.read([job.head]) < 100


def test_of_a_program_that_renames_its_one_file_and_never_rests_the_newest_goes_back(tmp_path, world, own_copy):
    job, program = outputs_job(tmp_path, world, "h1", launcher=TORCHRUN), Renamed()
    virtual = VirtualTime(program.run([job.host()], 4.5), 600)
    run_program(job, program, virtual, own_copy, top=job.host())
    assert job.outputs.restore()
    assert program.read([job.head]) >= 600 / 8.5 - 120 / 8.5


def _until(program, seconds):
    for wait_s in program:
        seconds -= wait_s
        if seconds < 0:
            return
        yield wait_s


def test_a_program_that_says_when_it_has_saved_needs_no_rest(tmp_path, world, own_copy):
    job = outputs_job(tmp_path, world, "h1", launcher=TORCHRUN)
    runs = world.home("h1") / ".gpurun/jobs" / JOB / "run"
    runs.mkdir()
    program = Declared([runs])
    virtual = VirtualTime(program.run([job.host()], 4.5), 600)
    run_program(job, program, virtual, own_copy, top=job.host())
    _, about = keeping.newest(os.open(job.folder.path.plain, os.O_RDONLY))
    assert job.outputs.restore()
    assert program.read([job.head]) == about.step > 10


@pytest.mark.parametrize(
    "said",
    ["", "x", "null", "[]", "{}", '{"step": 1.5}', '{"step": "7"}', '{"step": null}', '{"step": 9' + "9" * 5000 + "}",
     "[" * 9999],
)  # fmt: skip
def test_what_no_rank_can_have_said_is_nothing(job, clock, world, said):
    runs = world.home("h1") / ".gpurun/jobs" / JOB / "run"
    runs.mkdir()
    (runs / "checkpoint.0").write_text(said)
    (runs / "checkpoint.x").write_text(json.dumps({"step": 7}))
    (runs / "checkpoint.1").symlink_to(runs / "checkpoint.x")
    os.mkfifo(runs / "checkpoint.2")
    put(job.host("h1"), model="1")
    look(job, clock)
    look(job, clock, 1.0)
    assert newest(job) is None
    (runs / "checkpoint.3").write_text(json.dumps({"step": 7}))
    look(job, clock, 1.0)
    assert job.outputs.keeper.looks.step == 7


def test_status_names_the_whole_copy_with_its_step_and_age(job):
    job.head.mkdir()
    put(job.head, model="1")
    home = os.open(job.folder.path.plain, os.O_RDONLY)
    assert whole_text(job.folder) == "" and whole_json(job.folder) is None
    keeping.keep_generation(home, job.folder.path.plain, keeping.About(time.time() - 5405, 7))
    os.close(home)
    assert whole_text(job.folder) == f"step 7, 1h30m old, {newest(job)}"
    found = whole_json(job.folder)
    assert found == {"at_s": pytest.approx(time.time() - 5405, abs=60), "step": 7, "path": str(newest(job))}
    (newest(job).parent / "about.json").write_text("damaged")
    assert whole_json(job.folder) == {"at_s": 0.0, "step": None, "path": str(newest(job))}


def test_a_host_that_has_lost_its_folder_has_not_brought_its_last_state(job, clock):
    """Its disk was made anew, or somebody has cleaned up."""
    put(job.host("h1"), latest="1")
    put(job.host("h2"), shard="1")
    look(job, clock), look(job, clock)
    put(job.host("h1"), latest="2")
    look(job, clock)
    below.remove_path(str(job.host("h2")))
    with suppress(HostFailure):
        look(job, clock), look(job, clock)
    assert texts(job.head)["shard"] == "1", "the head has the only copy"
    collect_outputs(job)
    assert job.record.outputs_left is not None
    send_outputs(job)
    assert texts(job.host("h2")) == {"latest": "1", "shard": "1"}


def test_a_second_collection_after_a_late_host_is_whole(job, clock):
    put(job.host("h1"), latest="1")
    put(job.host("h2"), shard="1")
    look(job, clock), look(job, clock)
    put(job.host("h1"), latest="2")
    put(job.host("h2"), shard="2")
    lose(job, "h2")
    assert not job.host("h1").exists()
    assert collect_outputs(job) == set() and job.record.outputs_left is None
    send_outputs(job)
    assert texts(job.host("h2")) == {"latest": "2", "shard": "2"}


def test_what_a_host_kept_is_removed_for_a_whole_state_even_if_size_and_time_are_the_same(job, clock):
    """A program may set times, as `tar` and `cp -p` do. People are told."""
    put(job.host("h1"), model="1")
    os.utime(job.host("h1") / "model", (1, 1))
    look(job, clock), look(job, clock)
    put(job.host("h1"), model="2")
    os.utime(job.host("h1") / "model", (1, 1))
    lose(job, "h1")
    send_outputs(job)
    assert texts(job.host("h1")) == texts(job.host("h2")) == {"model": "1"}
    assert job.notes[-1] == (
        "gpurun removed outputs of an earlier attempt from h1: the head has no copy of these outputs, and all hosts get"
        " the last whole copy"
    )


def test_a_rank_that_has_saved_does_not_speak_for_one_that_has_not(job, clock, world):
    runs = world.home("h1") / ".gpurun/jobs" / JOB / "run"
    runs.mkdir()
    put(runs, **{"checkpoint.1": json.dumps({"step": 6})})
    put(job.host("h1"), shard0="7", shard1="6")
    put(runs, **{"checkpoint.0": json.dumps({"step": 7})})
    look(job, clock), look(job, clock, 0.1)
    assert newest(job) is None
    put(job.host("h1"), shard1="7")
    put(runs, **{"checkpoint.1": json.dumps({"step": 7})})
    look(job, clock, 0.1), look(job, clock, 0.1)
    assert texts(newest(job)) == {"shard0": "7", "shard1": "7"}
