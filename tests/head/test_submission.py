"""A submission: all jobs are stored or none, and who submitted knows which."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.cli.main import main
from gpurun.content import tree
from gpurun.content.images import Engine
from gpurun.content.tree import scan
from gpurun.content.workdir import Code
from gpurun.errors import BadInput, StateError
from gpurun.head import spawn
from gpurun.head import submit as submission
from gpurun.head.submit import submit_jobs
from gpurun.inventory.read import load_inventory
from gpurun.jobs.folder import CODES
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.store import AllocatorLock
from gpurun.state.audit import AuditLog
from gpurun.state.hosts import Machine, Machines, Out
from gpurun.state.paths import StatePath

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""
SPEC = JobSpec(name="a'; touch x #", image="i", gpus=2, command=("true",))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A state directory; images are there, and no process starts."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setattr(Engine, "image", lambda _, reference: SimpleNamespace(id=f"sha256:{reference}"))
    monkeypatch.setattr(spawn.Head, "start_supervisor", lambda _, _lease, lock: lock.close())
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def waiters(monkeypatch):
    """The waiters that were asked for."""
    asked = []
    monkeypatch.setattr(spawn.Head, "ensure_waiter", lambda self: asked.append(self.home))
    return asked


def submit(home, *specs, **options):
    return submit_jobs(specs, load_inventory(home.parent / "inventory.yaml"), home, os.environ, **options)


def test_many_jobs_are_submitted_with_one_pass(home, waiters, monkeypatch):
    passes, real = [], spawn.Head.run_pass
    monkeypatch.setattr(spawn.Head, "run_pass", lambda *a, **k: (passes.append(1), real(*a, **k))[1])
    done = submit(home, *(replace(SPEC, gpus=gpus) for gpus in (4, 4, 2, 2)))
    states = [folder.record().state for folder in done.folders]
    assert states == [State.GRANTED, State.GRANTED, State.QUEUED, State.QUEUED]
    assert [folder.record().gpus for folder in done.folders] == [4, 4, 2, 2]
    assert (done.problem, passes, waiters) == (None, [1], [home])
    assert [entry["job"] for entry in AuditLog(home).read() if entry["what"] == "submit"] == [
        f.id for f in done.folders
    ]


def test_what_the_images_name_means_now_is_what_the_job_will_run(home):
    done = submit(home, SPEC, replace(SPEC, image="j"), SPEC)
    pinned = [(folder.spec().image, folder.spec().image_id) for folder in done.folders]
    assert pinned == [("i", "sha256:i"), ("j", "sha256:j"), ("i", "sha256:i")]


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("submitted")
    return tmp_path / "work"


def kept(folder):
    code = Code(folder.code)
    return {entry.path: b"".join(code.content(digest)) for digest, entry in code.files.items()}


def test_what_the_workdir_holds_now_is_what_the_job_will_run(home, work):
    (folder,) = submit(home, replace(SPEC, workdir=str(work))).folders
    (work / "train.py").write_text("later")
    assert kept(folder) == {"train.py": b"submitted"}
    assert folder.spec().code == Code(folder.code).digest


def test_jobs_of_one_submission_share_the_copy_of_their_code(home, work, tmp_path):
    (tmp_path / "other").mkdir()
    specs = [replace(SPEC, workdir=str(work))] * 3 + [replace(SPEC, workdir=str(tmp_path / "other")), SPEC]
    folders = submit(home, *specs).folders
    assert [folder.code.stat().st_nlink for folder in folders[:4]] == [4, 4, 4, 2], "the store has one name of each"
    assert not folders[4].code.exists() and folders[4].spec().code == ""
    folders[0].path.rmtree()
    assert kept(folders[1]) == {"train.py": b"submitted"} and kept(folders[3]) == {}


def test_the_head_keeps_equal_code_once_however_often_it_is_submitted(home, work):
    folders = [submit(home, replace(SPEC, workdir=str(work))).folders[0] for _ in range(3)]
    assert len({folder.code.stat().st_ino for folder in folders}) == 1
    (work / "train.py").write_text("later")
    other = submit(home, replace(SPEC, workdir=str(work))).folders[0]
    assert other.code.stat().st_ino != folders[0].code.stat().st_ino
    assert (kept(folders[2]), kept(other)) == ({"train.py": b"submitted"}, {"train.py": b"later"})


def test_code_goes_with_the_last_job_that_has_it(home, work):
    one, two = [submit(home, replace(SPEC, workdir=str(work))).folders[0] for _ in range(2)]
    (store,) = [name for name in one.path.parent.names() if name.startswith(CODES)]
    one.path.rmtree()
    submit(home, SPEC)
    assert kept(two) == {"train.py": b"submitted"} and len((two.path.parent / store).names()) == 1
    two.path.rmtree()
    submit(home, SPEC)
    assert store not in two.path.parent.names()


def test_where_files_can_have_one_name_only_each_job_has_a_copy(home, work, monkeypatch):
    def no_link(path, to):
        raise StateError("cannot be linked: Operation not permitted", where=str(to))

    monkeypatch.setattr(StatePath, "link", no_link)
    folders = submit(home, *[replace(SPEC, workdir=str(work))] * 2).folders
    assert [kept(folder) for folder in folders] == [{"train.py": b"submitted"}] * 2


def test_code_that_cannot_be_read_stores_nothing(home, work):
    with pytest.raises(BadInput, match="not a folder"):
        submit(home, SPEC, replace(SPEC, workdir=str(work / "none")))
    assert JobStore(home).ids() == ()


def test_code_that_changes_meanwhile_stores_nothing(home, work, monkeypatch):
    def scanned(top):
        found = scan(top)
        (top / "train.py").write_text("half")
        return found

    monkeypatch.setattr(submission, "scan", scanned)
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        submit(home, replace(SPEC, workdir=str(work)))
    assert JobStore(home).ids() == ()
    assert not os.listdir(home / "jobs")


def test_a_digest_that_is_remembered_wrongly_refuses_one_submission_only(home, work, tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "RACY_S", -1.0)
    scan(work)
    (memory,) = (tmp_path / "cache/gpurun/trees").iterdir()
    memory.write_text(memory.read_text().replace("sha256:", "sha256:0"))
    with pytest.raises(BadInput, match="changed while gpurun read it"):
        submit(home, replace(SPEC, workdir=str(work)))
    (folder,) = submit(home, replace(SPEC, workdir=str(work))).folders
    assert kept(folder) == {"train.py": b"submitted"}


def test_an_image_that_is_missing_stores_nothing(home, monkeypatch):
    def image(_, reference):
        if reference == "missing":
            raise BadInput("the image missing is not on the head")
        return SimpleNamespace(id="sha256:1")

    monkeypatch.setattr(Engine, "image", image)
    with pytest.raises(BadInput):
        submit(home, SPEC, replace(SPEC, image="missing"))
    assert JobStore(home).ids() == ()


FAILURES = [StateError("the pools contradict each other"), OSError(11, "out of processes"), MemoryError("none is left")]


@pytest.mark.parametrize("error", FAILURES)
def test_a_pass_that_fails_leaves_jobs_that_are_looked_after(home, waiters, monkeypatch, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(spawn.Head, "run_pass", failing)
    done = submit(home, SPEC)
    assert done.folders[0].record().state is State.QUEUED
    assert str(getattr(error, "strerror", None) or error) in str(done.problem)
    assert waiters == [home]


def test_a_waiter_that_cannot_start_is_told(home, monkeypatch):
    def failing(*_):
        raise StateError("your waiter cannot start")

    monkeypatch.setattr(spawn.Head, "ensure_waiter", failing)
    done = submit(home, replace(SPEC, gpus=8), SPEC)
    assert "your waiter cannot start" in str(done.problem)
    assert len(JobStore(home).live_ids()) == 2


@pytest.fixture
def impatient(monkeypatch):
    """The allocator lock is held by somebody, and nobody waits long for it."""

    held = AllocatorLock.held
    monkeypatch.setattr(AllocatorLock, "held", lambda self, **_: held(self, patience_s=0.05))


def test_one_job_is_stored_though_the_lock_is_held(home, waiters, impatient):
    with AllocatorLock(home).held():
        done = submit(home, SPEC)
    assert "for the scheduler's lock" in str(done.problem)
    assert JobStore(home).live_ids() == (done.folders[0].id,)
    assert waiters == [home]


def test_many_jobs_are_none_if_the_lock_is_held(home, waiters, impatient):
    stored = []
    with AllocatorLock(home).held(), pytest.raises(StateError, match="for the scheduler's lock"):
        submit(home, SPEC, SPEC, on_stored=stored.extend)
    assert JobStore(home).ids() == JobStore(home).live_ids() == ()
    assert (stored, waiters) == ([], [])


def command(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["submit", "-n", "2", "--image", "i", *words, "--", "true"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return ended.value.code, out, err


def test_a_job_that_does_not_start_says_at_once_what_it_waits_for(home, capsys):
    inventory, now_s = load_inventory(home.parent / "inventory.yaml"), time.time()
    out = Out("ssh", "no route to host", now_s)
    looks = {host.machine: Machine(host.name, now_s, out=out, inventory=inventory.source) for host in inventory.hosts}
    home.mkdir()
    Machines(home).note(looks)
    code, out, err = command(capsys)
    assert code == 0
    job = out.strip()
    waits = (
        "the job needs 2 GPUs; 0 suitable GPUs of one generation are free for the job; "
        "the job needs hosts that are out of use"
    )
    said, told = err.splitlines()
    assert said == (
        "gpurun runs a copy for each of the 2 GPUs (tasks), because the command starts no launcher and no Python"
    )
    assert told == f"{job} waits: {waits}; `gpurun why {job}` explains why"


def test_the_command_prints_the_id_when_the_pass_fails(home, impatient, capsys):
    """Else people submit again, and the job runs twice."""
    with AllocatorLock(home).held():
        code, out, err = command(capsys)
    (job,) = JobStore(home).ids()
    assert (code, out) == (StateError.exit_code, f"{job}\n")
    assert "for the scheduler's lock" in err
    assert f"{job} is in the queue and will start later: do not submit the job again" in err


def test_the_document_is_printed_when_the_pass_fails(home, impatient, capsys):
    with AllocatorLock(home).held():
        code, out, err = command(capsys, "--json")
    (job,) = JobStore(home).ids()
    assert code == StateError.exit_code
    assert json.loads(out)["job"]["id"] == job
    assert "do not submit the job again" in err


@pytest.mark.parametrize(
    ("flags", "state"), [((), State.QUEUED), (("--json",), State.QUEUED), (("-f",), State.CANCELLED)]
)
def test_ctrl_c_while_the_pass_runs_names_the_job(home, monkeypatch, capsys, flags, state):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(spawn.Head, "run_pass", interrupted)
    code, out, err = command(capsys, *flags)
    (job,) = JobStore(home).ids()
    assert code == 130
    assert job in out + err
    assert JobStore(home).get(job).record().state is state


@pytest.mark.parametrize(
    ("recipe", "head", "limit"), [(None, "", None), (5, "", 5), (None, "3MiB", 3), (5, "3MiB", 3), (2, "3MiB", 2)]
)
def test_a_recipe_cannot_raise_the_inventory_s_limit_of_outputs(home, recipe, head, limit):
    with (home.parent / "inventory.yaml").open("a") as file:
        file.write(f"head: {{outputs_limit: {head}}}\n" if head else "")
    (folder,) = submit(home, replace(SPEC, outputs_limit_mib=recipe)).folders
    assert folder.spec().outputs_limit_mib == limit
