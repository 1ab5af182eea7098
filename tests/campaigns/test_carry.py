"""A campaign from its first run to its last, whoever stops it in between. Jobs end at once, as the tests say."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.errors import BadInput, StateUnavailable
from gpurun.head.submit import Submission
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state import durable
from gpurun.studies import campaigns as beginning
from gpurun.studies import campaigns as carrying
from gpurun.studies import runner as running
from gpurun.studies import store as storing
from gpurun.studies.campaign_plan import CampaignPlan
from gpurun.studies.campaign_report import CampaignReport
from gpurun.studies.campaigns import CampaignStore, Carrier, campaign_samples
from gpurun.supervisor.log import JobLog

JOBS = tuple(JobSpec("n", "i:1", gpus, ("train",)) for gpus in (1, 2))
PLAN = CampaignPlan("curve", JOBS, "/i.yaml", 2, 1.0)


class Killed(BaseException):
    """Stands for SIGKILL."""

    @classmethod
    def now(cls):
        raise cls


class Quiet:
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def begins(self, run, at, of, left_s):
        self.lines.append((run.gpus, run.number, at, of, left_s))

    def moves(self, record):
        pass

    def ends(self, run):
        self.lines.append((run.gpus, run.number, run.outcome))


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A state directory in which jobs are done as soon as they are queued."""
    jobs = JobStore(tmp_path / "home")
    made = SimpleNamespace(
        home=tmp_path / "home", jobs=jobs, store=CampaignStore(tmp_path / "home"), asked=[],
        end=lambda folder: finish(folder, images_per_s=50.0 * folder.record().gpus, batch=8.0, gradient_bytes=1e6),
    )  # fmt: skip

    def queue(specs, inventory, home, environ, *, codes, ids, origins):
        (folder,) = jobs.create_many(specs, inventory=inventory, now_s=1.0, codes=codes, ids=ids, origins=origins)
        made.asked.append(folder.id)
        made.end(folder)
        return Submission((folder,))

    monkeypatch.setattr(running, "queue_jobs", queue)
    monkeypatch.setattr(carrying, "POLL_S", 0.0)
    return made


def finish(folder, state=State.SUCCEEDED, reason="", **metrics):
    if metrics:
        log = JobLog(folder.log, attempt=1, now=lambda: 1.0)
        data = (json.dumps({"time": 1, "step": 1, "metrics": metrics}) + "\n").encode()
        log.take_output("h/0.1.1", 0, "m", len(data), data)
        log.close()
    record = folder.record()
    granted = tuple(Grant(f"h{at}", (0,)) for at in range(record.gpus))
    folder.write(record.but(state=state, reason=reason, granted=granted, granted_s=10.0, ended_s=46.0, attempt=1))


def test_two_that_begin_a_campaign_of_one_name_at_once_do_not_share_it(world, monkeypatch):
    together, found = threading.Barrier(2, timeout=60), []

    def pin(jobs, *_):
        together.wait()  # neither command has found the campaign
        return jobs, {}

    def command(at_s):
        try:
            folder, _ = beginning.begin_campaign(replace(PLAN, created_s=at_s), None, world.home, {})
            found.append(folder.plan().created_s == at_s)
        except StateUnavailable as error:
            found.append(str(error))

    monkeypatch.setattr(beginning, "pin", pin)
    threads = [threading.Thread(target=command, args=(at_s,)) for at_s in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert True in found and len(found) == 2
    assert next(each for each in found if each is not True).startswith("curve: another command has just started")
    assert world.store.folder.names() == ["curve"]


def test_what_a_killed_command_left_of_a_new_campaign_goes_when_the_next_one_begins(world):
    (world.home / "scaling" / ".new-0a1b2c3d").mkdir(parents=True)
    world.store.create(PLAN, None)
    assert world.store.folder.names() == ["curve"]


def carry(world, folder):
    watcher = Quiet()
    Carrier(folder, {}, watcher).run()
    return watcher.lines


def outcomes(folder):
    return [record.outcome for record in folder.records(folder.plan())]


def test_every_size_runs_as_often_as_asked_one_after_the_other(world):
    folder = world.store.create(PLAN, None)
    lines = carry(world, folder)
    assert [line[:4] for line in lines[::2]] == [(1, 1, 1, 4), (2, 1, 2, 4), (1, 2, 3, 4), (2, 2, 4, 4)]
    assert [line[4] for line in lines[::2]] == [None, 108.0, 72.0, 36.0]
    told = CampaignReport(folder.plan(), folder.records(PLAN))
    assert told.is_done and [(point.gpus, point.rate) for point in told.curve] == [(1, 50.0), (2, 100.0)]
    samples = campaign_samples(world.home, "curve", "horovod")
    assert [sample.ranks_per_host for sample in samples] == [(1,), (1, 1)] * 2


def test_a_finished_campaign_runs_nothing_again(world):
    folder = world.store.create(PLAN, None)
    carry(world, folder)
    assert carry(world, folder) == [] and len(world.asked) == 4


def test_killed_at_any_point_no_run_is_lost_and_none_runs_twice(world, monkeypatch):
    folder, left, deaths = world.store.create(PLAN, None), [0], 0

    def point():
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(storing.faults, "point", point)
    for life in range(1, 100):
        for job in filter(lambda job: job.path.exists(), map(world.jobs.get, world.jobs.live_ids())):
            if not job.record().state.ended:
                world.end(job)
        left[0] = life
        try:
            carry(world, folder)
            break
        except Killed:
            deaths += 1
    assert deaths > 10 and outcomes(folder) == ["measured"] * 4 and len(world.jobs.ids()) == 4


def test_samples_are_whole_whenever_the_last_command_was_killed(world, monkeypatch):
    folder = world.store.create(PLAN, None)

    with monkeypatch.context() as patch:
        patch.setattr(carrying.CampaignFolder, "write_samples", lambda *_: Killed.now())
        with pytest.raises(Killed):
            carry(world, folder)
    assert outcomes(folder) == ["open"]
    with monkeypatch.context() as patch:
        patch.setattr(Quiet, "ends", lambda *_: Killed.now())
        with pytest.raises(Killed):
            carry(world, folder)
    assert outcomes(folder) == ["measured"] and len(campaign_samples(world.home, "curve", "horovod")) == 1
    carry(world, folder)
    assert len(campaign_samples(world.home, "curve", "horovod")) == 4


def test_ctrl_c_cancels_the_running_job_and_the_next_command_runs_it_again(world, monkeypatch):
    folder, good = world.store.create(PLAN, None), world.end

    def interrupt(job):
        raise KeyboardInterrupt

    def cancel(job, **_):
        finish(job, State.CANCELLED, "Ctrl-C")

    monkeypatch.setattr(running, "cancel", cancel)
    world.end = interrupt
    with pytest.raises(KeyboardInterrupt):
        carry(world, folder)
    assert world.jobs.get(world.asked[0]).record().state is State.CANCELLED
    world.end = good
    carry(world, folder)
    assert outcomes(folder) == ["measured"] * 4 and len(world.asked) == 5


def test_after_ctrl_c_the_run_is_shown_as_open_and_another_job_measures_it(world, monkeypatch):
    folder, good, seen = world.store.create(PLAN, None), world.end, []
    monkeypatch.setattr(running, "cancel", lambda job, **_: finish(job, State.CANCELLED, "Ctrl-C"))

    def pause(_s):
        seen.append(len(world.jobs.ids()))
        raise KeyboardInterrupt

    world.end = lambda _job: None
    own_sleep = carrying.time.sleep
    monkeypatch.setattr(carrying.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        carry(world, folder)
    monkeypatch.setattr(carrying.time, "sleep", own_sleep)
    (shown,) = folder.records(PLAN)
    assert seen == [1] and (shown.job, shown.outcome, shown.reason) == (world.asked[0], "open", "")
    world.end = good
    assert [line[:4] for line in carry(world, folder)[::2]] == [(1, 1, 1, 4), (2, 1, 2, 4), (1, 2, 3, 4), (2, 2, 4, 4)]
    assert folder.records(PLAN)[0].job == world.asked[1]


def test_what_fails_is_kept_others_run_and_the_next_command_tries_again(world):
    folder, good = world.store.create(PLAN, None), world.end
    world.end = lambda job: finish(job, State.FAILED, "rank 1 failed") if job.record().gpus == 2 else good(job)
    carry(world, folder)
    assert outcomes(folder) == ["measured", "failed", "measured", "failed"]
    assert not CampaignReport(PLAN, folder.records(PLAN)).is_done
    world.end = good
    assert len(carry(world, folder)) == 4
    assert outcomes(folder) == ["measured"] * 4


def test_a_recipe_without_a_rate_ends_the_campaign_after_one_run(world):
    folder = world.store.create(PLAN, None)
    world.end = lambda job: finish(job, loss=0.5)
    with pytest.raises(BadInput, match="reported: loss") as caught:
        carry(world, folder)
    assert "gpurun_runtime.report" in caught.value.hint and outcomes(folder) == ["no-rate"]
    assert caught.value.job == world.asked[0]


def keep_in_files(folder):
    """Store the runs of a campaign as gpurun did before campaigns had a journal."""
    records = folder.records(PLAN)
    Path(str(folder.journal)).unlink()
    (folder.path / "runs").mkdir(0o755)
    for each in records:
        durable.write_record(folder.path / "runs" / f"{each.launcher}-{each.gpus}-{each.number}.json", each)
    return records


def test_a_campaign_of_an_older_gpurun_goes_on(world):
    folder, good = world.store.create(PLAN, None), world.end
    world.end = lambda job: good(job) if len(world.asked) < 2 else finish(job, State.FAILED, "rank 1 failed")
    carry(world, folder)
    assert keep_in_files(folder) == folder.records(PLAN)
    assert outcomes(folder) == ["measured", "failed", "failed", "failed"]
    world.end = good
    carry(world, folder)
    assert outcomes(folder) == ["measured"] * 4 and len(world.asked) == 4 + 3
    assert carry(world, folder) == []


def test_a_run_that_another_command_left_ends_before_the_next_begins(world):
    """Also a run that comes after one to be repeated: only one job of a campaign runs at a time."""
    folder, good = world.store.create(PLAN, None), world.end
    world.end = lambda job: finish(job, State.FAILED, "rank 0 failed") if len(world.asked) < 2 else Killed.now()
    with suppress(Killed):
        carry(world, folder)
    keep_in_files(folder)
    job = world.jobs.get(world.asked[1])

    def end(folder):
        assert job.record().state.ended
        good(folder)

    world.end = end
    threading.Timer(0.2, lambda: good(job)).start()
    lines = carry(world, folder)
    assert [line[:2] for line in lines[1::2]] == [(2, 1), (1, 1), (1, 2), (2, 2)], lines
    assert outcomes(folder) == ["measured"] * 4 and len(world.asked) == 5


def test_a_torn_line_of_a_command_that_was_killed_is_cut_off(world):
    folder = world.store.create(PLAN, None)
    carry(world, folder)
    path = Path(str(folder.journal))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    assert outcomes(folder) == [*["measured"] * 3, "open"]
    carry(world, folder)
    assert outcomes(folder) == ["measured"] * 4 and len(world.jobs.ids()) == 4


def test_one_command_at_a_time_carries_a_campaign(world):
    folder = world.store.create(PLAN, None)
    with folder.carried(), pytest.raises(StateUnavailable, match="another command"), folder.carried():
        pass
    with folder.carried():
        pass


@pytest.mark.parametrize("told", [{"images_per_s": 1.7e308}, {"images_per_s": 9.0, "loss": 1.7e308}])
def test_numbers_that_overflow_damage_no_record(world, told):
    """Each of two ranks reports the number: their sum, or the mean of them, is infinite."""

    def end(folder):
        finish(folder, **told)
        log = JobLog(folder.log, attempt=1, now=lambda: 1.0)
        data = (json.dumps({"time": 1, "step": 1, "metrics": told}) + "\n").encode()
        log.take_output("h/1.1.1", 1, "m", len(data), data)
        log.close()

    world.end = end
    folder = world.store.create(PLAN, None)
    with suppress(BadInput):
        carry(world, folder)
    assert outcomes(folder) == ["measured"] * 4 if "loss" in told else ["no-rate"]


@pytest.mark.parametrize("harm", ["lost", "joined", "another run", "no run", "below zero"])
def test_a_damaged_line_of_the_journal_costs_a_run_and_no_more(world, harm):
    """It left a campaign that measured one run again and again."""
    folder = world.store.create(PLAN, None)
    carry(world, folder)
    sound = folder.journal.read_bytes().splitlines(keepends=True)
    end = world.end
    numbers = {"another run": b'"trial":3', "no run": b'"trial":9', "below zero": b'"trial":-1'}
    for number, line in enumerate(sound):
        told = {"lost": b"\0" * len(line) + b"\n", "joined": line[:-1]}.get(harm) or re.sub(
            rb'"trial":\d', numbers.get(harm, b""), line
        )
        folder.journal.plain.write_bytes(b"".join([*sound[:number], told, *sound[number + 1 :]]))
        world.asked.clear()
        world.end = lambda job, end=end: end(job) if len(world.asked) < 5 else pytest.fail("runs go on without end")
        carry(world, folder)
        assert len(world.asked) <= 2 and outcomes(folder) == ["measured"] * 4
