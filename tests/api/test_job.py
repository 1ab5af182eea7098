"""A job as a future: it ends as the job ends, and `concurrent.futures` can wait for it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, CancelledError, as_completed, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import gpurun
from gpurun.api import asking
from gpurun.api import job as jobs
from gpurun.api.asking import COMMAND, clues_of_call
from gpurun.api.job import Job
from gpurun.errors import BadInput, JobFailed, NeverFits, NotYours, StateError
from gpurun.head.submit import Submission
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import FirstFailure, State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.launch.launchers.choosing import choose_launcher
from gpurun.runtime.gpurun_call import RESULTS

LIMIT_S = 30
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setattr(jobs, "POLL_S", 0.02)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def watcher(monkeypatch):
    """A watcher of the test's own, which ends with it: its thread looked after jobs beside all later tests."""
    monkeypatch.setattr(jobs, "Caretaker", Idle)
    own = jobs._Watcher()
    monkeypatch.setattr(jobs, "_WATCHER", own)
    yield own
    with own._lock:
        own._open, thread = [], own._thread
    if thread is not None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


class Idle:
    def look(self, folders):
        """Pick up nothing: nobody carries these jobs."""


@pytest.fixture
def folder(home):
    spec = JobSpec("train", "i", 2, COMMAND, outputs="/outputs")
    return JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=0.0)


def end(folder, state, **fields):
    folder.write(folder.record().but(state=state, ended_s=9.0, **fields))


def leave(folder, rank, **told):
    (folder.outputs / RESULTS).mkdir(parents=True, exist_ok=True)
    (folder.outputs / RESULTS / f"{rank}.json").write_text(json.dumps(told))


def test_the_value_of_rank_0_and_of_all_come_when_the_job_has_succeeded(folder):
    job = Job(folder, returns=True)
    assert (job.done(), job.running(), job.state) == (False, False, "QUEUED")
    with pytest.raises(TimeoutError):
        job.result(timeout=0.1)
    for rank in (0, 1):
        leave(folder, rank, value={"$tuple": [rank]})
    end(folder, State.SUCCEEDED, granted=())
    assert job.result(5) == (0,)
    assert job.results() == []
    assert job.exception() is None and job.done() and not job.cancel()


def test_the_exception_of_the_rank_that_failed_first_is_raised_with_its_traceback(folder):
    job = Job(folder, returns=True)
    leave(folder, 0, error={"kind": "ConnectionError", "text": "peer", "trace": "a"})
    leave(folder, 1, error={"kind": "ValueError", "text": "lr", "trace": "Traceback:\n  line 3"})
    end(folder, State.FAILED, reason="rank 1 exited with 1", first_failure=FirstFailure("x", rank=1))
    with pytest.raises(gpurun.RemoteError, match="rank 1: ValueError: lr\n\nTraceback:\n  line 3") as caught:
        job.result(5)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")


def test_a_rank_that_left_nothing_is_reported_as_the_job_is(folder):
    job = Job(folder, returns=True)
    end(folder, State.FAILED, reason="rank 0 on h1 failed first, with signal 9\x1b[2J")
    with pytest.raises(JobFailed, match="failed first") as caught:
        job.result(5)
    assert "\x1b" not in str(caught.value) and folder.id in caught.value.hint


def test_success_without_a_result_is_said_and_not_none(folder):
    job = Job(folder, returns=True)
    end(folder, State.SUCCEEDED)
    with pytest.raises(gpurun.NoResult, match="rank 0: the rank wrote no result"):
        job.result(5)


def test_a_queued_job_is_cancelled_and_the_future_with_it(folder, monkeypatch):
    monkeypatch.setattr("gpurun.head.spawn.Head.run_pass", lambda *_, **__: None)
    job = Job(folder, returns=True)
    assert job.cancel()
    assert wait([job], 5).done == {job}
    assert job.cancelled() and job.cancel() and folder.record().state is State.CANCELLED
    with pytest.raises(CancelledError):
        job.result()


def test_concurrent_futures_waits_for_jobs(home, folder):
    spec = JobSpec("other", "i", 1, ("true",))
    other = JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=0.0)
    one, two = Job(folder, returns=True), Job(other, returns=False)
    told = []
    two.add_done_callback(told.append)
    end(other, State.SUCCEEDED)
    assert wait([one, two], 5, FIRST_COMPLETED).done == {two}
    assert two.result() == 0 and told == [two]
    end(folder, State.TIMED_OUT, reason="over its time limit")
    assert set(as_completed([one, two], 5)) == {one, two}
    assert isinstance(one.exception(), JobFailed)


def test_a_job_that_is_removed_or_damaged_settles_and_no_other_waits_for_ever(home, folder):
    spec = JobSpec("other", "i", 1, ("true",))
    removed, other = JobStore(home).create_many([spec] * 2, inventory=home.parent / "inventory.yaml", now_s=0.0)
    gone, damaged, last = Job(removed, returns=False), Job(folder, returns=True), Job(other, returns=False)
    shutil.rmtree(str(removed.path))
    with pytest.raises(JobFailed, match="removed"):
        gone.result(5)
    (folder.outputs / RESULTS).mkdir(parents=True)
    (folder.outputs / RESULTS / "0.json").write_text('{"value": {"$array": "' + "A" * 64 + '"}}')
    end(folder, State.SUCCEEDED)
    with pytest.raises(gpurun.NoResult):
        damaged.result(5)
    end(other, State.SUCCEEDED)
    assert last.result(5) == 0


def test_whatever_goes_wrong_in_one_look_the_others_are_looked_after(home, folder, monkeypatch):
    def breaks(_self, _folders):
        raise StateError("damaged")

    monkeypatch.setattr(Idle, "look", breaks)
    job = Job(folder, returns=False)
    broken = Job(folder, returns=True)
    monkeypatch.setattr(broken, "_settle", lambda _record: 1 / 0)
    end(folder, State.SUCCEEDED)
    assert job.result(5) == 0
    with pytest.raises(ZeroDivisionError):
        broken.result(5)


def test_a_moment_without_memory_or_threads_ends_no_wait(folder, monkeypatch, watcher):
    settle, failures = watcher._settle, [MemoryError(), RuntimeError("can't start new thread")]

    def fails_at_first():
        if failures:
            raise failures.pop()
        settle()

    monkeypatch.setattr(watcher, "_settle", fails_at_first)
    end(folder, State.SUCCEEDED)
    assert Job(folder, returns=False).result(LIMIT_S) == 0
    assert failures == []


def test_thousands_of_jobs_that_wait_are_not_read_at_each_look(home, monkeypatch, watcher):
    spec = JobSpec("other", "i", 1, ("true",))
    folders = JobStore(home).create_many([spec] * 300, inventory=home.parent / "inventory.yaml", now_s=0.0)
    read = []
    record = JobFolder.record
    monkeypatch.setattr(JobFolder, "record", lambda self: (read.append(self.id), record(self))[1])
    monkeypatch.setattr(watcher, "watch", lambda _job: None)
    made = [Job(folder, returns=False) for folder in folders]
    watcher._open = list(made)
    watcher._settle()
    assert len(read) <= jobs.MOST_LOOKS
    end(folders[250], State.SUCCEEDED)
    JobStore(home).retire(folders[250].id)
    watcher._settle()
    assert made[250].result(0) == 0 and len(read) <= 2 * jobs.MOST_LOOKS + 2
    end(folders[251], State.SUCCEEDED)
    for _ in range(300 // jobs.MOST_LOOKS + 1):
        watcher._settle()
    assert made[251].result(0) == 0, "its mark is still there"


def test_a_child_that_forks_at_any_moment_can_wait_for_jobs(folder, watcher):
    with watcher._lock:
        watcher.forked()
        assert watcher._lock.acquire(timeout=1)
        watcher._lock.release()


@pytest.fixture
def asked(home, monkeypatch):
    """What is submitted, as specs; jobs without an image."""
    specs = []

    def submit_jobs(given, inventory, home, environ, **_):
        specs.extend(given)
        return Submission(tuple(JobStore(home).create_many(given, inventory=home.parent / "inventory.yaml", now_s=0.0)))

    monkeypatch.setattr(asking, "submit_jobs", submit_jobs)
    monkeypatch.setattr(asking.Waiter, "resume", lambda *_: ())  # starts no supervisor, which would write records, too
    return specs


def test_settings_are_those_of_a_recipe_and_of_its_constraints(asked):
    job = gpurun.submit(
        lambda: 1, gpus=8, image="i", gpus_per_host=4, time_limit="1h", env={"A": "1"}, launcher="torchrun"
    )
    (spec,) = asked
    assert (spec.gpus, spec.constraints.gpus_per_host, spec.time_limit_s, spec.env["A"]) == (8, 4, 3600.0, "1")
    assert (spec.name, spec.outputs, spec.launcher) == ("lambda", "/outputs", "torchrun")
    assert spec.command == COMMAND
    assert gpurun.job(job.id).id == job.id and gpurun.job("lambda")._returns


def test_a_function_on_one_gpu_needs_python_alone_and_a_gang_what_its_imports_say(asked):
    def reduces():
        import torch.distributed as dist

        dist.init_process_group("gloo")

    gpurun.submit(len, ("abc",), gpus=1, image="i")
    gpurun.submit(reduces, gpus=2, image="i")
    gpurun.submit(functools.partial(reduces), gpus=1, image="i")
    gpurun.submit(len, ("abc",), gpus=2, image="i", one_per_host=True)
    assert [spec.launcher for spec in asked] == ["tasks", "torchrun", "torchrun", "tasks"]


def test_a_gang_whose_function_says_nothing_is_refused_with_the_settings_that_would_do(asked, capsys):
    with pytest.raises(BadInput, match="how 2 processes of the program find each other") as caught:
        gpurun.submit(len, ("abc",), gpus=2, image="i")
    for setting in ("launcher='torchrun'", "launcher='horovod'", "launcher='tasks'", "one_per_host=True"):
        assert setting in caught.value.hint
    assert asked == []


def test_a_function_of_a_notebook_says_what_its_cells_have_imported(asked, monkeypatch):
    module = ModuleType("cells")
    exec("def train():\n    return hvd.rank()\n", vars(module))
    module.hvd = ModuleType("horovod.torch")
    monkeypatch.setitem(sys.modules, "cells", module)
    module.train.__module__ = "cells"
    assert choose_launcher(JobSpec("n", "i", 2, COMMAND), (), clues_of_call(module.train)).spec.launcher == "horovod"


def test_a_command_and_a_recipe_run_as_they_are(asked, tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: r\nimage: i\ngpus: 4\ncommand: [true]\n")
    gpurun.submit(["python3", "train.py"], gpus=1, image="i", launcher="tasks")
    gpurun.submit(tmp_path, gpus=2)
    assert [spec.command for spec in asked] == [("python3", "train.py"), ("true",)]
    assert asked[1].gpus == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [(0.1, None, "args"), ("abc", None, "args"), ({"lr": 1}, None, "args"), ((), [1], "kwargs"), ((), {1: 2}, "kwargs")]
)  # fmt: skip
def test_arguments_that_are_none_are_named(asked, args, kwargs, said):
    with pytest.raises(BadInput, match=said):
        gpurun.submit(len, args, kwargs, gpus=1, image="i")
    with pytest.raises(BadInput, match="each point"):
        gpurun.map(len, [0.1, 0.2], image="i")
    with pytest.raises(BadInput, match="values of lr"):
        gpurun.map(len, {"lr": 0.1}, image="i")
    with pytest.raises(BadInput, match="command"):
        gpurun.submit(len, ("x",), gpus=1, image="i", command=["true"])
    assert asked == []


def test_a_map_is_a_job_for_each_point(asked):
    def train(lr, layers):
        return lr * layers

    jobs = gpurun.map(train, {"lr": [0.1, 0.2], "layers": [1, 2, 3]}, image="i")
    assert len(jobs) == len({job.id for job in jobs}) == 6 and {spec.gpus for spec in asked} == {1}
    assert gpurun.map(train, [], image="i") == []
    assert len(gpurun.map(train, [{"lr": 1, "layers": 1}], image="i", gpus=2, launcher="tasks")) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"gpu": 1, "image": "i"}, "there is no setting 'gpu'"), ({"gpus": 1}, "no image"),
     ({"gpus": 0, "image": "i"}, "gpus"),
     ({"gpus": 1, "image": "i", "time_limit": "soon"}, "time_limit")],
)  # fmt: skip
def test_a_wrong_setting_is_named_and_nothing_is_submitted(asked, settings, said):
    with pytest.raises(BadInput, match=said):
        gpurun.submit(len, ("x",), **settings)
    with pytest.raises(BadInput, match="args and kwargs only with a function"):
        gpurun.submit(["true"], (1,), gpus=1, image="i")
    with pytest.raises(NeverFits):
        gpurun.submit(len, ("x",), gpus=99, image="i")
    assert asked == []


def test_a_wrong_setting_says_which_one_was_meant(asked):
    for wrong, meant in {"gpu": "gpus", "gpus_per_hosts": "gpus_per_host", "arg": "args", "imgae": "image"}.items():
        with pytest.raises(BadInput, match=f"there is no setting '{wrong}'") as refused:
            gpurun.submit(["true"], **{wrong: 1})
        assert refused.value.hint == f"did you mean {meant}?"
    with pytest.raises(BadInput) as refused:
        gpurun.submit(["true"], **{"a'; b\n": 1})
    assert "docs/reference/recipes.md" in refused.value.hint


def test_the_api_can_be_completed_and_costs_nothing_before_it_is_used():
    """`dir(gpurun)` was what the module itself had imported."""
    assert dir(gpurun) == sorted([*gpurun.__all__, "__version__"])
    for name in gpurun.__all__:
        assert callable(getattr(gpurun, name)), name
    stub = (Path(gpurun.__file__).parent / "__init__.pyi").read_text()
    assert sorted(re.findall(r"import (\w+) as", stub)) == sorted(gpurun.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        _ = gpurun.sumbit
    code = "import sys, gpurun; dir(gpurun); print([name for name in sys.modules if name.startswith('gpurun')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "['gpurun']\n"


@pytest.fixture
def nobody_starts(monkeypatch):
    monkeypatch.setattr(asking.Waiter, "resume", lambda *_: ())
    monkeypatch.setattr("gpurun.head.spawn.Head.run_pass", lambda *_, **__: None)


def test_jobs_are_this_user_s_that_have_not_ended_or_those_of_a_state(home, folder, nobody_starts):
    spec = JobSpec("done", "i", 2, ("true",))
    ended = JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=1.0)
    end(ended, State.FAILED)
    assert [each.id for each in gpurun.jobs()] == [folder.id]
    assert [each.id for each in gpurun.jobs("failed", "QUEUED")] == [folder.id, ended.id]
    assert gpurun.jobs("RUNNING") == []
    with pytest.raises(BadInput, match="'DONE' is not a state"):
        gpurun.jobs("FAILED", "DONE")
    (folder.path / "spec.json").plain.write_bytes(b"{")
    assert [each.id for each in gpurun.jobs()] == [folder.id], "a damaged spec hides no job"
    (folder.path / "state.json").plain.write_bytes(b"{")
    assert gpurun.jobs() == []


def test_cancel_takes_names_and_futures_and_all_or_none(home, folder, nobody_starts):
    other = JobStore(home).create(
        JobSpec("o'; x", "i", 2, ("true",)), inventory=home.parent / "inventory.yaml", now_s=1.0
    )
    with pytest.raises(BadInput, match="there is no job"):
        gpurun.cancel("train", "nobody's")
    assert folder.record().state is State.QUEUED
    assert [each.id for each in gpurun.cancel("o'; x", gpurun.job("train"))] == [other.id, folder.id]
    assert folder.record().state is other.record().state is State.CANCELLED
    assert gpurun.cancel() == []


def test_nobody_cancels_the_job_of_another_user(folder, nobody_starts, monkeypatch):
    monkeypatch.setattr("gpurun.head.spawn.os", SimpleNamespace(getuid=lambda: 4711))
    with pytest.raises(NotYours, match="belongs to"):
        gpurun.cancel(gpurun.job(folder.id))
    assert folder.cancel_request() is None


def test_a_dry_run_gives_the_plan_and_submits_nothing(asked, monkeypatch, capsys):
    """The same document as ``gpurun submit --dry-run --json``; the head here has no Docker."""
    monkeypatch.setattr("gpurun.head.submit.Engine", lambda _: SimpleNamespace(image=no_image))
    plan = gpurun.submit(["python3", "-c", "a'; b\n"], gpus=2, image="i", launcher="tasks", dry_run=True)
    assert plan["job"]["command"] == ["python3", "-c", "a'; b\n"] and list(plan["containers"]) == ["h1"]
    assert plan["image_problem"] == "the head does not have i"
    assert gpurun.submit(len, ("x",), gpus=1, image="i", dry_run=True)["job"]["command"] == list(COMMAND)
    assert gpurun.submit(["true"], gpus=8, image="i", launcher="tasks", dry_run=True)["placement"]["racks"] == ["r1"]
    with pytest.raises(BadInput, match="no image"):
        gpurun.submit(len, ("x",), gpus=1, dry_run=True)
    assert asked == [] and gpurun.jobs() == []


def no_image(name):
    raise BadInput(f"the head does not have {name}")
