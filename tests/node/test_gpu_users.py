"""The fence's proof that no process holds a GPU, with the real pynvml on the lab's stand-in for NVML."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import LIMIT_S, until

from gpurun.lab.gpus import FILE, build_stand_in, change, healthy, load_gpus, save
from gpurun.lab.spec import LabSpec, hosts_of
from gpurun.node import gpus as holders
from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call
from gpurun.node.job import parts
from gpurun.node.job.gang import fence
from gpurun.node.nvml_apart import NoAnswer, Nvml
from gpurun.supervisor.stop import what_is_left

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")

JOB = f"j-{os.getpid():08x}"  # hosts know a job's processes by its name: tests run beside each other


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """The state of this machine's pretended GPUs; a home for the job's folder."""
    path = tmp_path / FILE
    (host,) = hosts_of(LabSpec(racks=1, hosts=1, gpus=4), IPv4Network("10.200.3.0/24"))
    save(healthy("lab", host), path)
    monkeypatch.setenv("GPURUN_LAB_GPUS", str(path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_stand_in().library.parent))
    monkeypatch.setenv("HOME", str(tmp_path / "home's"))
    monkeypatch.setenv("GPURUN_DEV", str(tmp_path / "dev"))
    (tmp_path / "dev").mkdir()
    return path


@pytest.fixture
def process():
    """Start processes of a job, or of nobody's."""
    started = []

    def start(job=None, code="import time"):
        """One that sleeps after `code`; it does already on return."""
        environ = {**os.environ, **({"GPURUN_JOB": job} if job else {})}
        argv = [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(600)", "it's a \n stranger"]
        started.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def folder():
    return Path(parts.job_folder(JOB))


def fenced(**options):
    return fence(Call(1, lambda *_: None, False, b""), JOB, 1, containers=False, **options)


def cpu_s():
    """CPU seconds of this process and of those that have ended under it."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def folder_with_cards(gpus, *indices):
    uuids = load_gpus(gpus)
    cards = {str(i): {"uuid": uuids[f"gpu {i}"]["uuid"], "pci_bus": uuids[f"gpu {i}"]["pci"]} for i in indices}
    (folder() / "run").mkdir(parents=True)
    (folder() / "cards.json").write_text(json.dumps(cards))


def test_free_gpus_are_proven_free_quickly(gpus):
    folder_with_cards(gpus, 0, 1)
    fenced(gpus=[0, 1])  # everything is compiled and cached now
    times = []
    for _ in range(5):
        began = cpu_s()
        assert not any(fenced(gpus=[0, 1]).values())
        times.append(cpu_s() - began)
    assert not folder().exists()
    assert min(times) < 1.0, times  # most of it is Python's start, which a gang's end hides behind other work


def test_a_question_costs_milliseconds_once_the_process_stands(gpus):
    with Nvml() as nvml:
        nvml.ask([(0, "")])
        began = cpu_s()
        for _ in range(10):
            holders.find_holders(nvml, [(0, ""), (1, ""), (2, "")])
        assert (cpu_s() - began) / 10 < 0.1


def test_a_stranger_is_named_and_left_alone(gpus, process):
    stranger = process()
    change(gpus, 1, {"processes": f"{stranger.pid}:512"})
    folder_with_cards(gpus, 1)
    rest = fenced(gpus=[1])
    (holder,) = rest["users"]
    assert (holder["gpu"], holder["pid"], rest["folder"]) == (1, stranger.pid, False)
    said = what_is_left(rest)
    assert f"GPU 1 is held by pid {stranger.pid} of " in said and "time.sleep(600)" in said
    assert stranger.poll() is None
    assert [path.name for path in folder().iterdir()] == ["cards.json"], "secrets and keys go although the GPU is held"
    stranger.kill()
    stranger.wait()
    assert not any(fenced(gpus=[1]).values())
    assert not folder().exists()


def test_others_gpus_are_nobodys_business_here(gpus, process):
    change(gpus, 3, {"processes": f"{process().pid}:512"})
    assert not any(fenced(gpus=[0, 1]).values())


def test_an_x_server_keeps_no_gpu_from_its_proof_because_preflight_lets_jobs_start_beside_it(gpus, process):
    xorg, browser = process(), process()
    change(gpus, 0, {"graphics": f"{xorg.pid}:64,{browser.pid}:512"})
    assert not any(fenced(gpus=[0]).values())
    assert xorg.poll() is None and browser.poll() is None
    change(gpus, 0, {"processes": f"{browser.pid}:512"})  # one that computes, too
    assert [one["pid"] for one in fenced(gpus=[0])["users"]] == [browser.pid]


def test_what_was_there_before_the_job_is_none_of_the_job_s(gpus, process, monkeypatch):
    """It keeps no GPU from its proof: pre-flight of the next job names it. What came later does."""
    older = process()
    me = processes.read_process(os.getpid())
    agent = processes.read_process(older.pid)._replace(pid=me.pid)
    agent = agent._replace(started=agent.started + 1)
    (folder() / "run").mkdir(parents=True)
    monkeypatch.setattr(
        processes, "read_process", lambda pid, real=processes.read_process: agent if pid == me.pid else real(pid)
    )
    parts.own(JOB, 1)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    younger = process()
    change(gpus, 0, {"processes": f"{older.pid}:9 {younger.pid}:9"})
    for _ in range(2):  # while it is held, the note stays
        assert [one["pid"] for one in fenced(gpus=[0])["users"]] == [younger.pid]
    change(gpus, 0, {"processes": f"{older.pid}:9"})
    assert not any(fenced(gpus=[0]).values()) and older.poll() is None and not folder().exists()


@pytest.mark.parametrize(("noted", "kept"), [(None, 500), (400, 400), (500, 500), (9_000, 500), ("x", 500)])
def test_the_oldest_agent_of_a_job_is_noted_across_boots(gpus, monkeypatch, noted, kept):
    """After a reboot, the numbers begin anew: too small a one only counts more processes."""
    (folder() / "run").mkdir(parents=True)
    if noted is not None:
        (folder() / "agent.json").write_text(json.dumps({"pid": 7, "started": noted}))
    monkeypatch.setattr(processes, "read_process", lambda pid: processes.Process(pid, 1, 500, 0, ""))
    parts.own(JOB, 1)
    assert parts.began(JOB) == kept


@pytest.mark.parametrize("left", [{"attempt": "1\n"}, {"cards.json": '{"0": {"uuid": "GPU-0", "pci_bus": ""}}'}])
def test_since_when_a_gpurun_that_noted_no_agent_had_gpus_is_not_known(gpus, process, left):
    """An older gpurun began the job here, or could not prove its GPUs free: its ranks are older than this agent."""
    folder().mkdir(parents=True)
    for name, text in left.items():
        (folder() / name).write_text(text)
    parts.own(JOB, 2)
    assert parts.began(JOB) == 0


def test_a_daemon_with_every_device_open_is_no_heir_of_a_process_that_has_ended(gpus, process, tmp_path):
    """Such as nvidia-persistenced, which root sees."""
    (tmp_path / "dev/nvidia0").touch()
    daemon = process(code=f"import time; f = open({str(tmp_path / 'dev/nvidia0')!r})")
    since = processes.read_process(daemon.pid).started + 1
    with contextlib.closing(Orphan(process, tmp_path)) as nvml:
        nvml.parent.wait()
        found = holders.find_holders(nvml, [(0, "")], since=since).holders
        assert daemon.pid not in [one["pid"] for one in found] and len(found) == 1
        assert daemon.pid in [one["pid"] for one in holders.find_holders(nvml, [(0, "")]).holders]


def test_a_process_of_a_job_that_only_draws_holds_its_gpu(gpus, process):
    ours, others = process(JOB), process("j-00000000")
    change(gpus, 0, {"graphics": f"{ours.pid}:64,{others.pid}:64"})
    assert [one["pid"] for one in fenced(gpus=[0])["users"]] == [others.pid]
    ours.wait(LIMIT_S)


def test_an_orphan_of_the_job_is_ended(gpus, process, monkeypatch):
    """One that ignores SIGTERM is killed; the other has ended by then: no time of grace passes before it has."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    orphans = [process(JOB), process(JOB, deaf)]
    grace = SimpleNamespace(sleep=time.sleep, monotonic=lambda: orphans[0].poll() is not None and time.monotonic())
    monkeypatch.setattr(processes, "time", grace)
    change(gpus, 0, {"processes": " ".join(f"{one.pid}:9" for one in orphans)})
    assert not any(fenced(gpus=[0]).values())
    assert [one.wait(LIMIT_S) for one in orphans] == [-15, -9]


def test_another_jobs_process_is_a_stranger(gpus, process):
    other = process("j-ffffffff")
    change(gpus, 0, {"processes": f"{other.pid}:9"})
    assert [one["pid"] for one in fenced(gpus=[0])["users"]] == [other.pid]
    assert other.poll() is None


def test_a_gpu_is_found_by_uuid_although_indices_have_shifted(gpus, process):
    folder_with_cards(gpus, 2)
    made = load_gpus(gpus)
    made["gpu 1"]["uuid"], made["gpu 2"]["uuid"] = made["gpu 2"]["uuid"], made["gpu 1"]["uuid"]
    made["gpu 1"]["processes"] = f"{process().pid}:9"
    save(made, gpus)
    assert [one["gpu"] for one in fenced(gpus=[2])["users"]] == [2]


@pytest.mark.parametrize("facts", [{"error": "15"}, {"error": "16"}, {"error": "999"}, {"uuid": "GPU-else"}])
def test_a_gpu_that_does_not_answer_is_not_free(gpus, facts):
    folder_with_cards(gpus, 0)
    change(gpus, 0, facts)
    rest = fenced(gpus=[0])
    assert rest["gpu_problem"].startswith("GPU 0: NVML: ")
    assert rest["gpu_problem"] in what_is_left(rest)


def test_a_driver_that_hangs_is_no_proof(gpus):
    made = load_gpus(gpus)
    made["driver"]["hang_s"] = "3600"
    save(made, gpus)
    with Nvml() as nvml, pytest.raises(NoAnswer, match="hangs"):
        nvml.ask([(0, "")], timeout_s=0.5)


def test_without_a_driver_the_devices_holders_count(gpus, process, tmp_path):
    gpus.unlink()
    assert not any(fenced(gpus=[0]).values()), "no driver, no device: nothing can be held"
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidia1").touch()
    holder = process(code=f"import time; f = open({str(tmp_path / 'dev/nvidia1')!r})")
    assert [one["pid"] for one in fenced(gpus=[0, 1])["users"]] == [holder.pid]
    assert not any(fenced(gpus=[0]).values())


def test_what_reads_from_a_device_for_gpurun_holds_nothing_of_it(gpus, tmp_path):
    """NVML itself opens the device: on an H200, the fence's own process would have kept the GPU for ever."""
    gpus.unlink()
    (tmp_path / "dev/nvidia0").touch()
    code = f"f = open({str(tmp_path / 'dev/nvidia0')!r}); print(flush=True); input()  # from gpurun.node.nvml_apart"
    with subprocess.Popen([sys.executable, "-ISc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"\n"
        assert not any(fenced(gpus=[0]).values())


def test_a_process_in_a_container_cannot_pass_for_gpuruns(gpus, tmp_path, monkeypatch):
    gpus.unlink()
    (tmp_path / "dev/nvidia0").touch()
    code = f"f = open({str(tmp_path / 'dev/nvidia0')!r}); print(flush=True); input()  # from gpurun.node.nvml_apart"
    with subprocess.Popen([sys.executable, "-ISc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as liar:
        assert liar.stdout.readline() == b"\n"
        monkeypatch.setattr(holders, "container_of", lambda pid, proc: "c" * 64 if pid == liar.pid else "")
        assert [one["pid"] for one in fenced(gpus=[0])["users"]] == [liar.pid]


FORK = """
import os, time
device = open({device!r})
if os.fork() == 0:
    open({child!r}, "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({child!r}) or not os.path.getsize({child!r}): time.sleep(0.01)
pass"""


class Orphan:
    """NVML's list while a process that CUDA prepared before it forked has ended, and its child has not.

    As seen on an H200 with driver 580: the parent stays on the list until the child ends, too.
    """

    def __init__(self, process, folder, job=None):
        device, child = folder / "dev/nvidia0", folder / "child"
        device.touch()
        self.parent = process(job, FORK.format(device=str(device), child=str(child)))
        self.child = int(child.read_text())
        self.parent.kill()

    def ask(self, cards):
        listed = [self.parent.pid] if processes.read_process(self.child) else []
        return {"gpus": [{"index": 0, "pids": listed, "lost": ""}]}

    def close(self):
        if processes.read_process(self.child):
            os.kill(self.child, signal.SIGKILL)


@pytest.mark.parametrize("reaped", [True, False])
def test_the_child_of_a_process_that_has_ended_holds_its_gpu(gpus, process, tmp_path, reaped):
    with contextlib.closing(Orphan(process, tmp_path)) as nvml:
        os.waitid(os.P_PID, nvml.parent.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        (holder,) = holders.find_holders(nvml, [(0, "")]).holders
        assert (holder["pid"], "device = open" in holder["command"]) == (nvml.child, True)
    until(lambda: processes.read_process(nvml.child) is None)
    assert not holders.find_holders(nvml, [(0, "")]).holders


def test_a_jobs_child_that_outlived_its_parent_is_ended(gpus, process, tmp_path, monkeypatch):
    with contextlib.closing(Orphan(process, tmp_path, JOB)) as nvml:
        nvml.parent.wait()
        monkeypatch.setattr("gpurun.node.job.gang.Nvml", lambda: nvml)
        assert not any(fenced(gpus=[0]).values())
        assert processes.read_process(nvml.child) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"0": "GPU-1"}', "\0"])
def test_a_damaged_note_of_cards_falls_back_on_indices(gpus, text):
    folder().mkdir(parents=True)
    (folder() / "cards.json").write_text(text)
    assert not any(fenced(gpus=[0]).values())
