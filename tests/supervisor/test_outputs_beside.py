"""What ranks write beside their code is a part of their outputs: it comes home, and a restart begins with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from outputs_world import JOB, outputs_job

from gpurun.errors import HostFailure
from gpurun.launch.launchers.direct import TORCHRUN
from gpurun.supervisor.outputs import outputs
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.outputs.listing import Unbrought
from gpurun.supervisor.outputs.outputs import GONE, MOST_TOLD, _UnfitTold, collect_outputs, copy_outputs, send_outputs

MIB = 1 << 20
CODE = {"train.py": "train", "sub/model.py": "model", "empty/.keep": ""}


@pytest.fixture
def job(tmp_path, world):
    made = outputs_job(tmp_path, world, "h1", "h2", launcher=TORCHRUN)
    for host in made.hosts:
        written(made, host).mkdir(parents=True)
        put(code(made, host), **CODE)
    return made


def written(job, host="h1") -> Path:
    return job.host(host).with_name(f"{JOB}.beside") / "written"


def code(job, host="h1") -> Path:
    return job.world.home(host) / ".gpurun/jobs" / JOB / "workspace"


def put(top, **texts):
    for name, text in texts.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
        os.utime(top / name, ns=(10**18, 10**18))


def names(top):
    return {str(path.relative_to(top)) for path in top.rglob("*")}


def test_what_is_written_comes_home_and_goes_to_the_next_attempts_hosts(job):
    put(written(job), **{"snapshot.pt": "step 7", "runs/a/log": "log"})
    put(job.host(), model="m")
    assert copy_outputs(job) == []
    assert (job.head / "@workspace/snapshot.pt").read_text() == "step 7" and (job.head / "model").exists()
    assert collect_outputs(job) == set()
    assert not written(job).exists() and not written(job, "h2").exists()
    written(job, "h2").mkdir(parents=True)
    job.hosts = job.members = ("h2",)
    send_outputs(job)
    assert names(written(job, "h2")) == {"snapshot.pt", "runs", "runs/a", "runs/a/log"}
    assert names(job.host("h2")) == {"model"}
    assert copy_outputs(job) == [] and (job.head / "@workspace/snapshot.pt").read_text() == "step 7"


def test_a_copy_of_the_code_and_what_python_makes_are_not_written_by_the_program(job):
    """Where no overlay can be mounted, the folder has the code, too."""
    put(written(job), **CODE, **{"sub/__pycache__/model.cpython-311.pyc": "", "x.pyc": "", "new/__pycache__/y": ""})
    for top in (code(job), written(job)):
        (top / "link").symlink_to("train.py")
        (top / "moved").symlink_to("train.py" if top == code(job) else "sub/model.py")
    os.mkfifo(written(job) / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(written(job))
        bound.bind("socket")
    os.chdir("/")
    assert copy_outputs(job) == []
    assert names(job.head / "@workspace") == {"moved", "new"}
    put(written(job), **{"sub/best.pt": "best"})
    (written(job) / "train.py").write_text("trace")
    copy_outputs(job)
    assert names(job.head / "@workspace") == {"moved", "new", "sub", "sub/best.pt", "train.py"}


def test_a_host_that_has_been_fenced_still_knows_what_was_written(job):
    put(written(job), **CODE, **{"sub/best.pt": "best"})
    code(job).rename(written(job).with_name("workspace"))
    copy_outputs(job)
    assert names(job.head / "@workspace") == {"sub", "sub/best.pt"}


def test_hosts_that_write_different_files_of_one_name_keep_both(job):
    put(written(job), log="one")
    put(written(job, "h2"), log="two")
    copy_outputs(job)
    assert names(job.head) == {"@workspace", "@workspace/log", "@workspace/log.h2"}
    assert collect_outputs(job) == set()
    for host in job.hosts:
        written(job, host).mkdir(parents=True)
    send_outputs(job)
    assert [(written(job, host) / "log").read_text() for host in job.hosts] == ["one", "two"]


def test_what_is_over_the_limit_stays_and_is_named_while_the_job_runs(job):
    job.outputs = HeadCopy(job.folder, workdir_limit=MIB)
    (written(job) / "big").write_bytes(b"b" * 2 * MIB)
    put(written(job), small="s")
    (job.host() / "out").write_bytes(b"o" * 3 * MIB)
    unfit = copy_outputs(job)
    assert names(job.head) == {"out", "@workspace", "@workspace/small"}
    said = []
    told = _UnfitTold(said.append)
    told.tell(unfit)
    told.tell(unfit)
    assert said == [
        "a restarted job does not get a file that ranks wrote beside the code on h1: "
        "'big' does not fit: workdir_limit is 1 MiB"
    ]
    told.tell([Unbrought("h1", f"@workspace/{number}", "x") for number in range(99)])
    assert len(said) <= MOST_TOLD + 1
    assert collect_outputs(job) == {"h1"} and (written(job) / "big").exists(), "it may be all that there is"


def test_the_limit_of_all_outputs_counts_what_is_beside_the_code(job):
    job.outputs = HeadCopy(job.folder, MIB, workdir_limit=1 << 40)
    (written(job) / "big").write_bytes(b"b" * 2 * MIB)
    assert [each.why for each in copy_outputs(job)] == ["does not fit: outputs_limit is 1 MiB"]


def test_a_program_cannot_take_the_name_or_lead_a_copy_out(job, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("s")
    put(written(job), mine="m")
    (written(job) / "sub").symlink_to(tmp_path / "outside")
    (written(job) / "@workspace").mkdir()
    put(job.host(), **{"@workspace/theirs": "t", "other": "o"})
    copy_outputs(job)
    assert (job.head / "@workspace/mine").read_text() == "m" and (job.head / "@workspace/sub").is_symlink()
    assert names(job.head) == {"other", "@workspace", "@workspace/mine", "@workspace/sub", "@workspace/@workspace"}
    assert collect_outputs(job) == {"h1"}, "what has the name stays on its host"
    assert "gpurun itself uses its name" in job.record.outputs_left.words(JOB)


def test_files_go_back_below_no_link(job, tmp_path):
    put(written(job), **{"sub/best.pt": "best"})
    copy_outputs(job)
    job.outputs = HeadCopy(job.folder)
    (tmp_path / "outside").mkdir()
    (written(job, "h2") / "sub").symlink_to(tmp_path / "outside")
    job.hosts = job.members = ("h2",)
    send_outputs(job)
    assert names(tmp_path / "outside") == set()


def test_a_host_that_has_lost_the_folder_has_failed(job):
    """Its copy on the head may be all that is left."""
    put(written(job), snapshot="s")
    copy_outputs(job)
    (written(job) / "snapshot").unlink()
    written(job).rmdir()
    with pytest.raises(HostFailure, match=GONE):
        copy_outputs(job)
    assert (job.head / "@workspace/snapshot").exists()


def test_a_power_cut_in_the_middle_of_a_save_brings_back_the_last_whole_one(job, own_copy):
    clock = SimpleNamespace(now_s=1000.0)
    own_copy(outputs, "time", monotonic=lambda: clock.now_s, sleep=lambda _: None)

    def look(after_s=5.0):
        clock.now_s += after_s
        copy_outputs(job)

    put(written(job), **{"snapshot.pt": "step 7, whole"})
    for _ in range(3):
        look()
    (written(job) / "snapshot.pt").write_text("step 8, to")
    look(0.5)
    assert (job.head / "@workspace/snapshot.pt").read_text() == "step 8, to"
    job.links.silent.add("h1")
    job.hosts = job.members = ("h2",)
    send_outputs(job)
    assert (written(job, "h2") / "snapshot.pt").read_text() == "step 7, whole"
