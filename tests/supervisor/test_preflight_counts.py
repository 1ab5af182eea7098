"""What pre-flight's findings mean for a gang: it is placed elsewhere, or waits for a process to end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.doctor.findings import Finding, Severity
from gpurun.doctor.host_checks import strangers
from gpurun.doctor.survey import Preflight, Survey
from gpurun.facts import Gpu, GpuProcess, Hardware
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import Grant
from gpurun.supervisor import start
from gpurun.supervisor.verdict.causes import MAY_BE_THE_JOBS, is_unstarted
from gpurun.supervisor.verdict.ends import GangEnd

RECORD = JobRecord("j-00000001", "n", "o", 0, "/i", 4, State.PREPARING, 0.0, 0.0, attempt=6)
H1 = SimpleNamespace(name="h1", gpus=4)
FULL = Finding("shared-folder", Severity.ERROR, ("h1",), "is on nfs", "folder=DIR")
EVE = GpuProcess(7, 100, "eve", "/usr/bin/python3 x.py")


class Job:
    """As much of a job as pre-flight looks at."""

    def __init__(self, record=RECORD):
        self.record, self.hardware, self.inventory = record, {}, SimpleNamespace(by_name={"h1": H1})
        self.lease, self.spec = SimpleNamespace(grants=(Grant("h1", (0,)),)), SimpleNamespace(is_live_elastic=False)
        self.links = SimpleNamespace(fleet=None)
        self.told, self.home, self.noted = [], "home", []
        self.events = SimpleNamespace(emit=lambda kind, **fields: self.told.append((kind, fields)))
        self.clock = lambda: 1000.0

    def amend(self, **changes):
        self.record = self.record.but(**changes)


def end_of(job, monkeypatch, *blocking, processes=()):
    """Return the end of a gang on GPU 0 of a host; `processes` are on GPUs 0, 1, … of it."""
    gpus = tuple(Gpu(number, processes=each) for number, each in enumerate(processes))
    found = Hardware("h1", gpus=gpus)
    blocking += tuple(strangers(H1, found, frozenset({0}), Severity.ERROR))
    survey = Survey({"h1": found}, {})
    monkeypatch.setattr(start, "preflight", lambda *_, **__: Preflight(blocking, (), {"h1": found}, survey))
    monkeypatch.setattr(start, "note_survey", lambda *words: job.noted.append(words))
    with pytest.raises(GangEnd) as raised:
        start.examine(job, ["h1"])
    return raised.value.end


def test_a_finding_is_its_host_s_failure_and_no_job_s(monkeypatch):
    """`test_unstarted.py` has what follows: another placement, uncounted."""
    end = end_of(Job(), monkeypatch, FULL)
    assert (end.outcome, end.suspects, end.restart) == (State.FAILED, ("h1",), None)
    assert is_unstarted(State.PREPARING, end)
    assert {host: (error.kind, error.message) for host, error in end.by_host.items()} == {
        "h1": ("preflight", "shared-folder: is on nfs")
    }
    assert "shared-folder: is on nfs" in end.reason and "folder=DIR" in end.reason
    assert "preflight" not in MAY_BE_THE_JOBS


def test_what_a_preflight_finds_is_a_look_at_its_hosts(monkeypatch):
    """Jobs behind it need not find that out for themselves, and wait a minute for a program of the site that hangs.

    `gpurun.doctor.survey` decides which findings are a broken host: a process on a GPU ends.
    """
    job = Job()
    end_of(job, monkeypatch, FULL)
    ((home, inventory, hosts, survey, _),) = job.noted
    assert (home, inventory, hosts, list(survey.hardware)) == (job.home, job.inventory, [H1], ["h1"])
    job = Job()
    found = Hardware("h1", gpus=(Gpu(0, processes=(EVE,)),))
    end_of(job, monkeypatch, processes=[(EVE,)])
    ((_, _, hosts, survey, _),) = job.noted
    assert hosts == [H1] and survey.hardware == {"h1": found}
    monkeypatch.setattr(start, "preflight", lambda *_, **__: Preflight((), (), {"h1": found}, survey))
    sound = Job()
    monkeypatch.setattr(start, "note_survey", lambda *words: sound.noted.append(words))
    start.examine(sound, ["h1"])
    assert len(sound.noted) == 1, "a host that is sound is heard of, too"


def test_a_gang_waits_for_a_process_that_no_job_started_and_never_fails_because_of_it(monkeypatch):
    """The process kept its GPU for a minute: after five placements, in 6 s, the job had failed."""
    job = Job(RECORD.but(placements=4, avoid=("h1",)))
    end = end_of(job, monkeypatch, processes=[(EVE,), (), (EVE,)])
    assert (end.outcome, end.suspects, end.failure, end.restart) == (State.QUEUED, (), None, None)
    assert job.record.placements == 4 and end.by_host == {}
    assert end.reason == "h1: python3 of eve (pid 7) holds GPUs 0, 2: no gpurun job started this process"
    (holder,) = end.refused["h1"]
    assert (holder.gpus, holder.job, holder.user, holder.process) == ((0, 2), "", "eve", "python3 of eve (pid 7)")
    ((kind, told),) = job.told
    assert (kind, told["host"], told["state"]) == ("host", "h1", "refused") and "pid 7" in told["reason"]


def test_processes_of_gpurun_s_jobs_and_gpus_that_no_inventory_has_are_nobody_s(monkeypatch):
    ours = GpuProcess(8, job="j-0000000b")
    end = end_of(Job(), monkeypatch, processes=[(EVE, ours), (ours,), (), (), (EVE,)])
    assert [(each.gpus, each.process) for each in end.refused["h1"]] == [((0,), "python3 of eve (pid 7)")]


def test_a_process_beside_another_problem_excludes_its_gpus_and_the_host_is_avoided(monkeypatch):
    job = Job()
    end = end_of(job, monkeypatch, FULL, processes=[(EVE,)])
    assert (end.outcome, end.suspects, [*end.by_host]) == (State.FAILED, ("h1",), ["h1"])
    assert end.reason.startswith("h1: shared-folder:")
    assert [each.gpus for each in end.refused["h1"]] == [(0,)]


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "a\nb", "x" * 100_000, "\0", "\u202e"])
def test_what_a_host_says_of_its_processes_is_fit_to_be_printed_and_stored(monkeypatch, text):
    many = tuple(GpuProcess(number, None, text, text, text) for number in range(1000))
    end = end_of(Job(), monkeypatch, processes=[many, many])
    (holder,) = end.refused["h1"]
    assert (holder.gpus == (0, 1) and "998 more" in holder.process) or len(text) > 200
    assert (holder.user + holder.process + end.reason).isprintable() and len(repr(holder)) + len(end.reason) < 2000
