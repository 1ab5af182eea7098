"""A sweep from its first point to its end, whoever is killed in between. Jobs are stored, and end as the tests say."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from how_many import count

from gpurun.errors import StateDiskError, StateError, StateUnavailable, words_of
from gpurun.failing import Calls
from gpurun.head.submit import Submission
from gpurun.jobs.record import CancelRequest, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state import clock
from gpurun.state.clock import Presence
from gpurun.state.paths import StatePath
from gpurun.studies import runner as running
from gpurun.studies import store as storing
from gpurun.studies.runner import Conductor, conduct, reopen
from gpurun.studies.store import SweepStore
from gpurun.studies.sweep_pictures import curves
from gpurun.studies.sweep_plan import Wish
from gpurun.supervisor.log import JobLog

TEMPLATE = JobSpec(name="n", image="i:1", gpus=1, command=("train",))
INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
GRID = {"lr": ("1", "2", "3", "4", "5")}


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A state directory in which jobs are queued, and nobody starts them."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    jobs = JobStore(tmp_path / "home")

    def queue(specs, inventory, home, environ, *, codes, ids, origins):
        del environ
        made = JobStore(home).create_many(specs, inventory=inventory, now_s=1.0, codes=codes, ids=ids, origins=origins)
        return Submission(made)

    def ask(folder, *, by, reason, environ):
        del environ
        folder.ask_to_cancel(CancelRequest("cancel", by, 1.0, reason))

    monkeypatch.setattr(running, "queue_jobs", queue)
    monkeypatch.setattr(running, "cancel", ask)
    return SimpleNamespace(
        home=tmp_path / "home",
        inventory=str(tmp_path / "inventory.yaml"),
        jobs=jobs,
        store=SweepStore(tmp_path / "home"),
    )


def begin(world, template=TEMPLATE, add_code=None, **wish):
    plan = Wish(**wish).plan(template, world.inventory, 1.0)
    return world.store.create(plan, add_code)


def carry(world, folder):
    return Conductor(folder, {})


def live(world):
    """Jobs that have not ended, by trial."""
    return {int(world.jobs.get(job).spec().env["GPURUN_TRIAL"].partition("/")[2]): job for job in world.jobs.live_ids()}


def end(world, job, state=State.SUCCEEDED, reason=""):
    folder = world.jobs.get(job)
    folder.write(folder.record().but(state=state, reason=reason, ended_s=2.0))
    world.jobs.retire(job)


def report(world, job, *steps, metric="accuracy", rank=0, attempt=1):
    log = JobLog(world.jobs.get(job).log, attempt=attempt, now=lambda: 1.0)
    data = "".join(json.dumps({"time": 1, "step": s, "metrics": {metric: v}}) + "\n" for s, v in steps).encode()
    known = log.have("h").get(f"{rank}.1.1", [0, 0, 0])[2]
    log.take_output(f"h/{rank}.1.1", rank, "m", known + len(data), data)
    log.close()


def outcomes(folder):
    return {trial.number: (trial.outcome, trial.value) for trial in folder.trials().by_number.values()}


def test_every_point_runs_once_and_no_more_at_a_time_than_may(world):
    folder = begin(world, grid=GRID, max_parallel=2)
    one = carry(world, folder)
    seen, rounds = {}, 0
    while not one.step():
        now = live(world)
        assert 1 <= len(now) <= 2
        seen.update(now)
        end(world, now[min(now)])
        rounds += 1
    assert rounds == 5 and sorted(seen) == [0, 1, 2, 3, 4] and len(set(seen.values())) == 5
    assert {outcome for outcome, _ in outcomes(folder).values()} == {"complete"}
    assert folder.done.exists() and world.store.unfinished() == []
    parameters = {n: json.loads(world.jobs.get(job).spec().env["GPURUN_PARAMETERS"])["lr"] for n, job in seen.items()}
    assert parameters == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}


def test_without_a_bound_as_many_wait_as_the_inventory_has_gpus_for(world):
    folder = begin(world, grid={"lr": tuple(map(str, range(50)))})
    carry(world, folder).step()
    assert len(live(world)) == 4  # two GPUs, and as many that wait


@pytest.mark.parametrize("search", [{"grid": GRID}, {"tpe": 5, "space": {"lr": ("0..1",)}}])
def test_killed_at_any_point_no_trial_is_lost_and_none_runs_twice(world, monkeypatch, search):
    """Each conductor dies one fault point later than the one before."""
    folder = begin(world, **search, max_parallel=2, metric="accuracy")
    left = [0]

    def point():
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    for module in (running, storing):
        monkeypatch.setattr(module.faults, "point", point)
    done, deaths, jobs = False, 0, {}
    for life in range(1, 400):
        left[0] = life
        try:
            one = carry(world, folder)
            while not (done := one.step()):
                for trial, job in live(world).items():
                    jobs.setdefault(trial, set()).add(job)
                    report(world, job, (1, trial / 10))
                    end(world, job)
            break
        except Killed:
            deaths += 1
    assert done and deaths > 10
    assert {trial: len(ids) for trial, ids in jobs.items()} == dict.fromkeys(range(5), 1)
    assert len(world.jobs.ids()) == 5
    assert outcomes(folder) == {n: ("complete", n / 10) for n in range(5)}


def whole_sweep(world, folder, number, own_copy):
    """A whole sweep whose conductor's `number`-th call fails, by the real loop. Returns the calls and the jobs."""
    jobs, calls = {}, Calls(world.home, number)

    def others_act(_s):
        calls.counts = False
        for trial, job in live(world).items():
            jobs.setdefault(trial, set()).add(job)
            report(world, job, (1, trial / 10))
            end(world, job)
        calls.counts = True

    own_copy(running, "time", sleep=others_act)
    with calls.installed():
        conduct(folder, {}, Presence(world.home))
    return calls, jobs


def test_whatever_call_of_a_conductor_fails_no_trial_is_lost_and_none_runs_twice(world, own_copy):
    def sweep(number):
        folder = begin(world, grid=GRID, max_parallel=2, metric="accuracy")
        calls, jobs = whole_sweep(world, folder, number, own_copy)
        assert {trial: len(ids) for trial, ids in jobs.items()} == dict.fromkeys(range(5), 1), calls.failed
        assert outcomes(folder) == {n: ("complete", n / 10) for n in range(5)}, calls.failed
        assert folder.done.exists()
        return calls

    total = 1_000_000 - sweep(1_000_000).left
    step = max(1, total // count("calls that fail once"))
    assert total > 200 and all(sweep(number).failed for number in range(1, total - 20, step))


def test_a_conductor_killed_after_the_marks_of_its_jobs_and_before_the_jobs_submits_them(world, monkeypatch):
    """SIGKILL runs no `finally`: the marks in ``live`` stay, and no command may come that removes them."""
    folder = begin(world, grid=GRID, max_parallel=2)

    def kill(specs, *_, ids, **__):
        world.jobs.live.plain.mkdir(parents=True)
        for job in ids:
            (world.jobs.live / job).touch()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(running, "queue_jobs", kill)
        with pytest.raises(Killed):
            carry(world, folder).step()
    assert len(world.jobs.live_ids()) == 2 and world.jobs.ids() == ()
    carry(world, folder).step()
    assert sorted(world.jobs.ids()) == sorted(world.jobs.live_ids()) and sorted(live(world)) == [0, 1]


@pytest.mark.parametrize("is_empty_mount_point", [False, True])
@pytest.mark.parametrize("submitted", [False, True])
def test_a_state_directory_that_is_away_for_a_moment_ends_no_trial(world, submitted, is_empty_mount_point):
    """All jobs of the sweep then look as if somebody had removed them."""
    folder, away = begin(world, grid=GRID, max_parallel=2), world.home.with_name("away")
    one = carry(world, folder)
    if submitted:
        one.step()
    before = live(world)
    world.home.rename(away)
    if is_empty_mount_point:
        world.home.mkdir()
    for _ in range(3):
        with pytest.raises(StateUnavailable, match="does not exist"):
            one.step()
    assert world.home.exists() is is_empty_mount_point, "it makes no other directory in its place"
    if is_empty_mount_point:
        world.home.rmdir()  # nothing was written there
    away.rename(world.home)
    assert not one.step()
    assert {**live(world), **before} == live(world) and len(live(world)) == 2
    assert [outcome for outcome, _ in outcomes(folder).values()] == [None, None]


@pytest.mark.parametrize("how", ["away", "unreadable"])
def test_a_conductor_begins_as_soon_as_its_files_can_be_read(world, monkeypatch, own_copy, how):
    folder, away, waited = begin(world, grid={"lr": ("1",)}), world.home.with_name("away"), []
    carry(world, folder).step()
    end(world, live(world)[0])
    here, real = Presence(world.home), os.pread
    if how == "away":
        world.home.rename(away)
    else:
        monkeypatch.setattr(storing.os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale")))

    def sleep(seconds):
        waited.append(seconds)
        if how == "away":
            away.rename(world.home)
        monkeypatch.setattr(storing.os, "pread", real)

    own_copy(running, "time", sleep=sleep)
    opened = len(os.listdir("/proc/self/fd"))
    conduct(folder, {}, here)
    assert waited == [running.RETRY_S] and folder.done.exists()
    assert len(os.listdir("/proc/self/fd")) == opened + 1, "its journal is open"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_conductor_outlives_a_machine_without_threads_or_memory(world, monkeypatch, own_copy, error):
    """`ulimit -u` counts threads, too."""
    folder, real, said = begin(world, grid=GRID), running.queue_jobs, []

    def fails(*_, **__):
        monkeypatch.setattr(running, "queue_jobs", real)
        raise error

    def others_act(seconds):
        said.append((seconds, folder.trouble()))
        for job in live(world).values():
            end(world, job)

    monkeypatch.setattr(running, "queue_jobs", fails)
    own_copy(running, "time", sleep=others_act)
    conduct(folder, {}, Presence(world.home))
    assert said[0] == (running.RETRY_S, words_of(error))
    assert {outcome for outcome, _ in outcomes(folder).values()} == {"complete"}


def test_a_conductor_ends_if_its_state_directory_is_gone(world, monkeypatch):
    folder, here = begin(world, grid=GRID), Presence(world.home)
    monkeypatch.setattr(clock, "AWAY_MOST_S", 0.0)
    world.home.rename(world.home.with_name("elsewhere"))
    conduct(folder, {}, here)
    assert not world.home.exists()


def test_a_torn_line_of_one_that_was_killed_is_cut_off(world):
    folder = begin(world, grid=GRID, max_parallel=1)
    carry(world, folder).step()
    path = Path(str(folder.journal))
    path.write_bytes(path.read_bytes() + b'{"kind": "asked", "at_s": 1.0, "tri')
    one = carry(world, folder)
    one.step()
    assert list(live(world)) == [0]
    assert path.read_bytes().endswith(b"\n") and len(folder.trials().by_number) == 1


def test_what_fails_is_an_outcome_and_the_sweep_goes_on(world):
    folder = begin(world, grid=GRID, metric="accuracy", max_parallel=5)
    one = carry(world, folder)
    one.step()
    now = live(world)
    report(world, now[0], (1, 0.5), (2, 0.75))
    end(world, now[0])
    report(world, now[1], (1, 0.5), metric="acc")
    end(world, now[1])  # never reported the sweep's metric
    report(world, now[2], (1, 0.5), (2, float("nan")))
    end(world, now[2])
    end(world, now[3], State.FAILED, "rank 0 failed first, with exit code 1")
    end(world, now[4], State.CANCELLED, "cancelled by somebody")
    assert one.step()
    assert outcomes(folder) == {
        0: ("complete", 0.75), 1: ("failed", None), 2: ("failed", None), 3: ("failed", None), 4: ("cancelled", None),
    }  # fmt: skip
    reasons = {trial.number: trial.reason for trial in folder.trials().by_number.values()}
    assert "never reported accuracy; the job reported acc" in reasons[1] and "not a number at step 2" in reasons[2]
    assert "exit code 1" in reasons[3] and "somebody" in reasons[4]


def to_its_end(world, folder):
    for _ in range(9):
        for job in live(world).values():
            if world.jobs.get(job).cancel_request() is not None:
                end(world, job, State.CANCELLED, "cancelled by its sweep")
        if carry(world, folder).step():
            return
    raise AssertionError("the sweep does not end")


@pytest.mark.parametrize(("metric", "line"), [("accuracy", "accuracy=…"), ("val/loss-1", "**{'val/loss-1': …}")])
def test_a_sweep_stops_at_its_first_trial_without_the_metric(world, metric, line):
    """Fifty trials ran one after the other, and all failed for the same reason. A new conductor takes each step."""
    folder = begin(world, grid={"lr": tuple(map(str, range(50)))}, metric=metric, max_parallel=2)
    carry(world, folder).step()
    end(world, live(world)[0])
    to_its_end(world, folder)
    assert [outcome for outcome, _ in outcomes(folder).values()] == ["failed", "cancelled"]
    why = folder.trouble()
    assert (
        f"like trial 0: the job ended with exit code 0 and never reported {metric}" in why
        and f"report(step, {line})" in why
    )
    reopen(folder, also_failed=False)
    assert folder.trouble() == "" and not carry(world, folder).step(), "a person who resumes it knows better"
    report(world, live(world)[1], (1, 0.5), metric=metric)
    end(world, live(world)[2])
    one = carry(world, folder)
    one.step()
    assert not folder.stop.exists() and sorted(live(world)) == [1, 3], "trials that do report: the next one fails alone"


def test_a_conductor_killed_while_it_stops_its_sweep_stops_it_all_the_same(world, monkeypatch):
    folder = begin(world, grid=GRID, metric="accuracy", max_parallel=2)
    carry(world, folder).step()
    end(world, live(world)[0])
    with monkeypatch.context() as patch:
        patch.setattr(running.JournalEntry, "__post_init__", lambda _: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            carry(world, folder).step()
    to_its_end(world, folder)
    assert "never reported accuracy" in folder.trouble() and len(outcomes(folder)) == 2


def test_a_last_or_only_trial_without_the_metric_stops_nothing(world):
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy")
    carry(world, folder).step()
    end(world, live(world)[0])
    assert carry(world, folder).step() and not folder.stop.exists()


def test_the_lowest_rank_that_reports_counts_and_an_attempt_that_begins_anew_replaces_the_one_before(world):
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy")
    one = carry(world, folder)
    one.step()
    (job,) = live(world).values()

    def known(*, after_a_kill=False):
        (carry(world, folder) if after_a_kill else one).step()
        trial = folder.trials().by_number[0]
        return trial.step, trial.value, [(each.step, each.value) for each in curves(folder.entries())[0]]

    report(world, job, (1, 0.1), (2, 0.2), rank=3)
    assert known() == (2, 0.2, [(1, 0.1), (2, 0.2)])
    report(world, job, (1, 0.3), rank=0)
    assert known() == (1, 0.3, [(1, 0.3)]), "whatever rank 3 said before rank 0 spoke"
    report(world, job, (3, 0.9), rank=3)
    report(world, job, (3, 0.5), metric="loss", rank=0)
    assert known() == (1, 0.3, [(1, 0.3)])
    report(world, job, (2, 0.4), (3, 0.5), (3, 0.6), rank=0)
    assert known() == (3, 0.6, [(1, 0.3), (2, 0.4), (3, 0.6)]), "a step told again replaces the earlier value"
    report(world, job, (2, 0.7), rank=1, attempt=2)
    assert known() == (2, 0.7, [(1, 0.3), (2, 0.7)]), "it continues behind its checkpoint at step 1"
    assert known(after_a_kill=True) == (2, 0.7, [(1, 0.3), (2, 0.7)])
    report(world, job, (3, 0.8), rank=1, attempt=2)
    assert known(after_a_kill=True) == (3, 0.8, [(1, 0.3), (2, 0.7), (3, 0.8)])


def test_a_conductor_that_follows_a_killed_one_notes_no_report_twice(world):
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy")
    carry(world, folder).step()
    (job,) = live(world).values()
    report(world, job, (1, 0.1), (2, float("nan")), rank=1)
    report(world, job, (1, 0.1))
    for _ in range(3):
        carry(world, folder).step()
    report(world, job, (2, float("nan")))
    for _ in range(3):
        carry(world, folder).step()
    assert [(entry.step, entry.value) for entry in folder.entries() if entry.kind == "reported"] == [
        (1, 0.1), (2, None),
    ]  # fmt: skip


def test_a_log_that_a_power_cut_shortened_is_read_again(world):
    """The journal may then know a report that the log lacks."""
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy")
    carry(world, folder).step()
    (job,) = live(world).values()
    report(world, job, (1, 0.1), (2, 0.2))
    carry(world, folder).step()
    Path(str(world.jobs.get(job).log)).write_bytes(b"")
    report(world, job, (1, 0.3))
    carry(world, folder).step()
    assert outcomes(folder) == {0: (None, 0.3)}


def test_a_loser_is_cancelled_once_and_counts_as_stopped_early(world):
    folder = begin(world, grid={"lr": ("1", "2")}, metric="accuracy:max", stop="asha:min=1,factor=2", max_parallel=2)
    one = carry(world, folder)
    one.step()
    now = live(world)
    report(world, now[0], (1, 0.9))
    one.step()
    report(world, now[1], (1, 0.1), (2, 0.2))
    one.step()
    request = world.jobs.get(now[1]).cancel_request()
    assert (request.by, request.reason) == ("its sweep", "stopped early: accuracy was 0.1 at step 1")
    carry(world, folder).step()  # the next conductor asks again, which changes nothing
    assert world.jobs.get(now[0]).cancel_request() is None
    end(world, now[1], State.CANCELLED, "cancelled by its sweep")
    end(world, now[0])
    assert carry(world, folder).step()
    assert outcomes(folder) == {0: ("complete", 0.9), 1: ("pruned", 0.2)}


def test_stop_and_resume(world):
    folder = begin(world, grid=GRID, max_parallel=2)
    one = carry(world, folder)
    one.step()
    first = live(world)
    end(world, first[0], State.FAILED, "no")
    one.step()
    folder.stop.touch()
    assert not one.step()
    for job in live(world).values():
        assert world.jobs.get(job).cancel_request() is not None
        end(world, job, State.CANCELLED, "the sweep was stopped")
    assert one.step() and folder.done.exists()
    assert [o for o, _ in outcomes(folder).values()] == ["failed", "cancelled", "cancelled"]
    assert reopen(folder, also_failed=False) == 2
    one = carry(world, folder)
    ran = []
    while not one.step():
        ran += sorted(live(world))
        for job in live(world).values():
            end(world, job)
    assert ran == [1, 2, 3, 4]
    assert reopen(folder, also_failed=True) == 1
    one = carry(world, folder)
    one.step()
    assert list(live(world)) == [0]


def test_a_trial_whose_job_somebody_removed_is_no_hang(world):
    folder = begin(world, grid={"lr": ("1",)})
    one = carry(world, folder)
    one.step()
    (job,) = live(world).values()
    end(world, job)
    world.jobs.get(job).path.rmtree()
    assert one.step()
    assert folder.trials().by_number[0].reason == "the job of the trial was removed"


def test_a_trial_whose_record_is_damaged_does_not_hold_up_the_others(world):
    folder = begin(world, grid=GRID, max_parallel=2)
    one = carry(world, folder)
    one.step()
    job = live(world)[0]
    (Path(str(world.jobs.get(job).path)) / "state.json").write_text("{")
    while not one.step():
        for each in set(live(world).values()) - {job}:
            end(world, each)
        if len(folder.trials().by_number) == 5 and len(live(world)) == 1:
            world.jobs.retire(job)
    found = outcomes(folder)
    assert found.pop(0) == ("failed", None) and {outcome for outcome, _ in found.values()} == {"complete"}
    assert "the job's record is damaged" in folder.trials().by_number[0].reason


def test_a_sweep_goes_with_its_last_job(world):
    folder = begin(world, grid={"lr": ("1", "2")})
    one = carry(world, folder)
    one.step()
    jobs = list(live(world).values())
    gone = set()
    spent = lambda: world.store.remove_spent(lambda job: job not in gone)  # noqa: E731
    gone.update(jobs)
    assert spent() == 0, "it is not done"
    for job in jobs:
        end(world, job)
    assert one.step()
    gone.clear()
    gone.add(jobs[0])
    assert spent() == 0 and world.store.ids() == [folder.id]
    gone.add(jobs[1])
    lock = folder.take_lock()
    assert spent() == 0, "somebody resumes it just now"
    os.close(lock)
    assert spent() == 1 and world.store.ids() == []


def test_what_cannot_be_done_now_is_told_and_tried_again(world, monkeypatch, own_copy):
    folder = begin(world, grid={"lr": ("1",)})
    real, failing = running.queue_jobs, [True]

    def queue(*args, **kwargs):
        if failing:
            failing.clear()
            raise StateError("the disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(running, "queue_jobs", queue)
    slept = []

    def sleep(seconds):
        slept.append(folder.trouble())
        for job in live(world).values():
            end(world, job)

    own_copy(running, "time", sleep=sleep)
    conduct(folder, {}, Presence(world.home))
    assert slept[:2] == ["the disk is full", ""] and folder.trouble() == "" and len(world.jobs.ids()) == 1


def test_trials_run_the_code_that_was_submitted(world):
    """Whatever the workdir holds by then: each job has a name of the sweep's own copy."""
    template = replace(TEMPLATE, code="c0de")

    def add_code(path: StatePath):
        descriptor = path.open_file(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, b"[]\n")
        os.close(descriptor)

    folder = begin(world, template, add_code, grid={"lr": ("1", "2")}, max_parallel=1)
    one = carry(world, folder)
    while not one.step():
        for job in live(world).values():
            end(world, job)
    inodes = {Path(str(world.jobs.get(job).code)).stat().st_ino for job in world.jobs.ids()}
    assert inodes == {Path(str(folder.code)).stat().st_ino}


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff", b'{"name": 7}'])
def test_a_damaged_plan_is_named(world, damage):
    folder = begin(world, grid=GRID)
    Path(str(folder.path), "plan.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"plan\.json"):
        carry(world, folder)


def test_what_a_killed_command_left_of_a_new_sweep_goes_when_the_next_one_begins(world):
    (world.home / "sweeps" / ".new-s-0a1b2c3d").mkdir(parents=True)
    folder = begin(world, grid=GRID)
    assert world.store.folder.names() == [folder.id]


def test_damaged_lines_of_a_journal_are_passed_over(world):
    folder = begin(world, grid=GRID, max_parallel=1)
    carry(world, folder).step()
    with Path(str(folder.journal)).open("ab") as file:
        file.write(b'\xff\n[]\n{"kind": "asked"}\n\0\0\0\n{"kind":"ended","at_s":1,"trial":0,"outcome":"won"}\n')
        file.write(b'{"kind":"asked","at_s":1,"trial":0,"job":"../j-00000001"}\n')
    assert [(trial.outcome, trial.job[:2]) for trial in folder.trials().by_number.values()] == [(None, "j-")]


def test_a_trial_whose_line_is_damaged_runs_again_and_no_other_does(world):
    folder = begin(world, grid=GRID, max_parallel=1)
    one = carry(world, folder)
    while not one.step():
        end(world, *live(world).values())
    lines = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.plain.write_bytes(b"\0" * 20 + b"\n" + b"".join(lines[1:]).replace(b'"trial":4', b'"trial":44'))
    one, again = carry(world, folder), []
    while not one.step():
        again += live(world)
        assert len(again) <= 2, again
        end(world, *live(world).values())
    assert sorted(again) == [0, 4]


def test_only_the_owner_can_have_written_a_sweep(world):
    folder = begin(world, grid=GRID)
    assert folder.is_mine()
    Path(str(folder.path)).chmod(0o775)
    assert not folder.is_mine() and world.store.unfinished() == []


def fill_disk(monkeypatch):
    """Have the next write of the journal stop in the middle, as on a full disk; later writes succeed."""
    write_all = storing.durable.write_all

    def torn(descriptor, data):
        monkeypatch.setattr(storing.durable, "write_all", write_all)
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storing.durable, "write_all", torn)


def test_a_report_that_a_full_disk_refused_is_read_again(world, monkeypatch):
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy:max")
    one = carry(world, folder)
    one.step()
    job = live(world)[0]
    report(world, job, (1, 0.5), (2, 0.9))
    fill_disk(monkeypatch)
    with pytest.raises(StateDiskError, match="is full"):
        one.step()
    end(world, job)
    while not one.step():
        pass
    assert outcomes(folder) == {0: ("complete", 0.9)}


def test_a_resume_on_a_full_disk_says_so(world, monkeypatch):
    folder = begin(world, grid={"lr": ("1",)})
    one = carry(world, folder)
    one.step()
    end(world, live(world)[0], State.CANCELLED)
    assert one.step()
    fill_disk(monkeypatch)
    with pytest.raises(StateDiskError, match="is full"):
        reopen(folder, also_failed=False)
    assert folder.done.exists()
    assert reopen(folder, also_failed=False) == 1


def test_a_torn_line_on_a_full_disk_takes_no_later_line_with_it(world, monkeypatch):
    folder = begin(world, grid=GRID, max_parallel=2)
    one = carry(world, folder)
    fill_disk(monkeypatch)
    with pytest.raises(StateDiskError, match="is full"):
        one.step()
    one.step()
    assert {number: trial.job for number, trial in folder.trials().by_number.items()} == live(world)


@pytest.mark.parametrize("step", [-1, -(10**30), 10**30])
@pytest.mark.parametrize("stop", [None, "asha"])
def test_a_step_that_cannot_be_ends_no_conductor(world, step, stop):
    pytest.importorskip("optuna")
    folder = begin(world, grid={"lr": ("1",)}, metric="accuracy:max", stop=stop)
    one = carry(world, folder)
    one.step()
    job = live(world)[0]
    report(world, job, (step, 0.5))
    one.step()
    report(world, job, (1, 0.7))
    end(world, job)
    again = carry(world, folder)
    while not again.step():
        pass
    assert outcomes(folder) == {0: ("complete", 0.7)}


def test_a_prune_that_is_killed_lets_no_sweep_run_again(world, monkeypatch):
    folder = begin(world, grid={"lr": ("1",)})
    one = carry(world, folder)
    one.step()
    end(world, live(world)[0])
    assert one.step()

    def killed(path):
        (path / "done").unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StatePath, "rmtree", killed)
        with pytest.raises(Killed):
            world.store.remove_spent(lambda _: False)
    assert not world.store.unfinished()
    world.store.remove_spent(lambda _: False)
    assert world.store.folder.names() == []


def test_a_resume_that_was_killed_can_be_repeated(world, monkeypatch):
    folder = begin(world, grid={"lr": ("1",)})
    one = carry(world, folder)
    one.step()
    end(world, live(world)[0], State.FAILED)
    assert one.step()
    with monkeypatch.context() as patch:
        patch.setattr(StatePath, "unlink", lambda *_, **__: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            reopen(folder, also_failed=True)
    reopen(folder, also_failed=True)
    assert not folder.done.exists()
    assert not carry(world, folder).step() and list(live(world)) == [0]


@pytest.mark.parametrize("change", [{"trials": 9}, {"trials": 0}, {"max_parallel": 0}])
def test_a_plan_that_somebody_edited_is_a_clear_error(world, change):
    folder = begin(world, grid={"lr": ("1", "2")})
    plan = json.loads((folder.path / "plan.json").read_bytes())
    (folder.path / "plan.json").plain.write_text(json.dumps({**plan, **change}))
    with pytest.raises(StateError, match="plan"):
        one = carry(world, folder)
        for _ in range(3):
            one.step()
            for job in live(world).values():
                end(world, job)
