"""A campaign from its first run to its last, whoever stops it in between. Jobs end at once, as the tests say."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.errors import BadInput, StateUnavailable
from gpurun.head.submit import Submission
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.studies import campaigns as beginning
from gpurun.studies import campaigns as carrying
from gpurun.studies import campaigns as storing
from gpurun.studies.campaign_plan import CampaignPlan
from gpurun.studies.campaign_report import CampaignReport
from gpurun.studies.campaigns import CampaignStore, Carrier, campaign_samples
from gpurun.supervisor.log import JobLog

JOBS = tuple(JobSpec("n", "i:1", gpus, ("train",)) for gpus in (1, 2))
PLAN = CampaignPlan("curve", JOBS, "/i.yaml", 2, 1.0)


class Killed(BaseException):
    """Stands for SIGKILL."""


class Quiet:
    """Keeps what it is told."""

    def __init__(self):
        self.lines = []

    def begins(self, run, at, of, left_s):
        self.lines.append((run.gpus, run.number, at, of, left_s))

    def moves(self, record):
        pass

    def ends(self, run, record):
        self.lines.append((run.gpus, run.number, record.outcome))


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

    monkeypatch.setattr(carrying, "queue_jobs", queue)
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
    Carrier(world.home, folder, {}, watcher).run()
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
    assert deaths > 2 and outcomes(folder) == ["measured"] * 4 and len(world.jobs.ids()) == 4


def test_ctrl_c_cancels_the_running_job_and_the_next_command_runs_it_again(world, monkeypatch):
    folder, good = world.store.create(PLAN, None), world.end

    def interrupt(job):
        raise KeyboardInterrupt

    def cancel(job, **_):
        finish(job, State.CANCELLED, "Ctrl-C")

    monkeypatch.setattr(carrying, "cancel", cancel)
    world.end = interrupt
    with pytest.raises(KeyboardInterrupt):
        carry(world, folder)
    assert world.jobs.get(world.asked[0]).record().state is State.CANCELLED
    world.end = good
    carry(world, folder)
    assert outcomes(folder) == ["measured"] * 4 and len(world.asked) == 5


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
