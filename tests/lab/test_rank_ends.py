"""A gang ends when its ranks end, with their reason, whatever their children, shells and launchers do."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cluster import TRAIN
from faulting import events, kill_supervisor, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("train")]

GRACE_S = 3
NAMED_S = 8.0
"""Promised are 2 s, and measured 1.2; the machine that tests run on is busy."""
LAUNCHERS = {"gloo": [], "mpi": ["--controller", "mpi"], "elastic": ["--min-gpus", "1"]}

LOADER = """
import multiprocessing, os, sys, time
def load():
    time.sleep(600)
if __name__ == "__main__":
    worker = multiprocessing.Process(target=load)
    worker.start()
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    print("rank", rank, "has a data loader", flush=True)
    time.sleep(2)
    if rank == sys.argv[1]:
        print("fails at", time.time(), flush=True)
        os._exit(int(sys.argv[2]))
    time.sleep(600)
"""
RANK = "${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}"


def start(cluster, *command, flags=(), grace_s=GRACE_S, per_host=1, more=""):
    folder = cluster.folder / "recipe"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(
        f"image: {TRAIN}\ngpus: {2 * per_host}\ngrace: {grace_s}s\n"
        f"constraints: {{gpus_per_host: {per_host}}}\n"
        f"command: {json.dumps(command)}\n{more}"
    )
    done = cluster.gpurun("submit", str(folder), "-i", str(cluster.inventory), *flags)
    assert done.code == 0, done.err
    return done.out.strip()


def finish(cluster, job, timeout_s=90):
    cluster.gpurun("wait", job, "--timeout", str(timeout_s), timeout_s=timeout_s + 30)
    return cluster.job(job)


def at(cluster, job, state):
    return next(event["t"] for event in events(cluster, job) if event.get("state") == state)


def record(**what):
    """Keep a figure, if somebody asked for them."""
    if path := os.environ.get("GPURUN_STORIES"):
        with Path(path).open("a") as stream:
            stream.write(
                json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in what.items()})
                + "\n"
            )


def assert_ended_in_time(cluster, job, failed_s):
    """The first rank to fail was named soon, and the gang was gone soon after its grace."""
    named_s, ended_s = at(cluster, job, "STOPPING") - failed_s, at(cluster, job, cluster.job(job)["state"]) - failed_s
    record(job=job, named_s=named_s, ended_s=ended_s)
    assert named_s <= NAMED_S
    assert ended_s <= NAMED_S + GRACE_S + 5


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize(("rank", "code"), [(1, 37), (0, 1)])
def test_a_rank_that_fails_beside_its_data_loader_is_named(cluster, launcher, rank, code):
    job = start(cluster, "python3", "-c", LOADER, str(rank), str(code), flags=LAUNCHERS[launcher])
    found = finish(cluster, job)
    assert (found["state"], found["exit_code"]) == ("FAILED", code), found["reason"]
    assert (found["first_failure"]["rank"], found["first_failure"]["host"]) == (rank, found["hosts"][rank])
    (failed,) = [line for line in cluster.log(job).splitlines() if "fails at" in line]
    assert_ended_in_time(cluster, job, float(failed.split()[-1]))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "script",
    [
        "sleep 600 & exit 0",
        "setsid sh -c 'trap \"\" TERM; sleep 600' & exit 0",
        "nohup sleep 600 >/dev/null 2>&1 & exit 0",
    ],
    ids=["child", "daemon", "nohup"],
)
def test_what_outlives_ranks_that_succeeded_ends_with_them(cluster, launcher, script):
    job = start(cluster, "sh", "-c", f"sleep 1; echo done at $(date +%s.%N); {script}", flags=LAUNCHERS[launcher])
    found = finish(cluster, job)
    assert (found["state"], found["exit_code"]) == ("SUCCEEDED", 0), found["reason"]
    last_s = max(float(line.split()[-1]) for line in cluster.log(job).splitlines() if "done at" in line)
    assert at(cluster, job, "SUCCEEDED") - last_s <= GRACE_S + 10


def test_a_program_under_a_shell_gets_its_notice_and_its_grace(cluster):
    """The shell does not `exec` the program, and dies of the signal first."""
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('trains', flush=True)\ntime.sleep(600)\n"
    )
    job = start(cluster, "sh", "-c", 'python3 -c "$0"; exit $?', program)
    wait_until(lambda: cluster.log(job).count("trains") == 2)
    asked = time.time()
    assert cluster.gpurun("cancel", job).code == 0
    finish(cluster, job)
    assert cluster.log(job).count("saved") == 2
    assert at(cluster, job, "CANCELLED") - asked <= GRACE_S + 5


def test_a_cancel_does_not_break_a_ranks_data_loader_before_the_rank(cluster):
    """Only the rank gets the notice: PyTorch's loader, for example, fails a rank whose worker ends."""
    program = (
        "import multiprocessing, os, signal, sys, time\n"
        "def load():\n    signal.signal(signal.SIGTERM, lambda *_: print('loader told', flush=True)); time.sleep(600)\n"
        "worker = multiprocessing.get_context('fork').Process(target=load, daemon=True)\nworker.start()\n"
        "def save(*_):\n    time.sleep(1); print('saved, loader', worker.is_alive(), flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('trains', flush=True)\ntime.sleep(600)\n"
    )
    job = start(cluster, "python3", "-c", program)
    wait_until(lambda: cluster.log(job).count("trains") == 2)
    assert cluster.gpurun("cancel", job).code == 0
    finish(cluster, job)
    assert cluster.log(job).count("saved, loader True") == 2


SAVES = """
import os, signal, sys, time
if sys.argv[1] == "with MPI":
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
def told(*_):
    print("told", flush=True)
    if rank in (1, 2):
        time.sleep(8)
        with open(os.path.join(os.environ["GPURUN_OUTPUTS"], f"saved.{rank}"), "w") as file:
            file.write("whole")
        print("saved", flush=True)
    os._exit(rank)
signal.signal(signal.SIGTERM, told)
print("trains", flush=True)
while rank != 3 or not os.path.exists("/run/gpurun/fail"):
    time.sleep(0.05)
print("fails at", time.time(), flush=True)
os._exit(37)
"""
SAVES_GRACE_S = 14


def start_saving(cluster, launcher):
    """Start four ranks. Told to end, rank 0 returns 0, rank 3 fails; ranks 1 and 2, one on each host, save for 8 s."""
    name, _, library = launcher.partition(" ")
    command = ["python3", "-c", SAVES, library]
    job = start(
        cluster, *command, flags=LAUNCHERS[name], grace_s=SAVES_GRACE_S, per_host=2, more="outputs: /out\n"
    )  # fmt: skip
    wait_until(lambda: cluster.log(job).count("trains") == 4)
    return job


def assert_saved(cluster, job):
    """Ranks 1 and 2, on two hosts, were told once and had their grace."""
    lines = [line for line in cluster.log(job).splitlines() if "[1]<stdout>" in line or "[2]<stdout>" in line]
    assert sorted(line.rpartition(":")[2] for line in lines) == ["saved", "saved", "told", "told", "trains", "trains"]
    outputs = cluster.home / "jobs" / job / "outputs"
    assert {path.name: path.read_text() for path in outputs.iterdir()} == {"saved.1": "whole", "saved.2": "whole"}


@pytest.mark.parametrize("launcher", ["gloo", "mpi", "mpi with MPI"])
def test_a_cancelled_rank_has_its_whole_grace_although_others_end_at_once(cluster, launcher):
    """horovodrun kills ranks 5 s after the end of another, mpirun 2 s after it."""
    job = start_saving(cluster, launcher)
    asked = time.time()
    assert cluster.gpurun("cancel", job).code == 0
    assert finish(cluster, job)["state"] == "CANCELLED"
    took_s = at(cluster, job, "CANCELLED") - asked
    record(launcher=launcher, cancel_took_s=took_s)
    assert_saved(cluster, job)
    assert took_s <= SAVES_GRACE_S + 5


@pytest.mark.parametrize("launcher", ["gloo", "mpi", "mpi with MPI"])
def test_ranks_beside_one_that_failed_have_their_whole_grace(cluster, launcher):
    job = start_saving(cluster, launcher)
    cluster.lab.run(cluster.job(job)["hosts"][1], ["touch", f"/home/train/.gpurun/jobs/{job}/run/fail"])
    found = finish(cluster, job)
    assert (found["state"], found["exit_code"]) == ("FAILED", 37), found["reason"]
    (failed, *_) = [line for line in cluster.log(job).splitlines() if "fails at" in line]
    record(launcher=launcher, failure_took_s=at(cluster, job, "FAILED") - float(failed.split()[-1]))
    assert_saved(cluster, job)
    assert at(cluster, job, "FAILED") - float(failed.split()[-1]) <= NAMED_S + SAVES_GRACE_S + 5


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_bytes_that_are_no_text_pass_and_block_nobody(cluster, launcher):
    program = (
        "import sys; out = sys.stdout.buffer; out.write(b'caf\\xe9 \\xff\\xfe\\n'); out.flush()\n"
        "for number in range(20000): out.write(b'line %d\\n' % number)\n"
    )
    job = start(cluster, "python3", "-c", program, flags=LAUNCHERS[launcher])
    found = finish(cluster, job)
    assert found["state"] == "SUCCEEDED", found["reason"]
    raw = (cluster.home / "jobs" / job / "log").read_bytes()
    assert raw.count(b">:caf\xe9 \xff\xfe\n") == 2
    for rank in (b"0", b"1"):
        lines = [line for line in raw.split(b"\n") if b"[" + rank + b"]<stdout>:line" in line]
        assert [int(line.split()[-1]) for line in lines] == list(range(20000))


def test_a_line_without_end_passes(cluster):
    mib = int(os.environ.get("GPURUN_LINE_MIB", "64"))
    job = start(cluster, "sh", "-c", f"test {RANK} = 1 || head -c {mib}M /dev/zero | tr '\\0' x; echo; echo end")
    found = finish(cluster, job, timeout_s=300)
    assert found["state"] == "SUCCEEDED", found["reason"]
    raw = (cluster.home / "jobs" / job / "log").read_bytes()
    assert raw.count(b"x" * 1000) == mib * (1 << 20) // 1000 or raw.count(b"x") >= mib << 20
    assert raw.count(b">:end\n") == 2


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize(("signal", "code"), [("SEGV", 139), ("KILL", 137), ("TERM", 143)])
def test_a_rank_that_a_signal_ends_is_named(cluster, launcher, signal, code):
    script = f"sleep 2; test {RANK} != 1 || kill -s {signal} $$; sleep 600"
    job = start(cluster, "sh", "-c", script, flags=LAUNCHERS[launcher])
    found = finish(cluster, job)
    assert (found["state"], found["exit_code"]) == ("FAILED", code), found["reason"]
    assert found["first_failure"]["rank"] == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_a_cancel_at_any_moment_of_the_start_waits_for_nobody_who_is_not_there(cluster, delay_s):
    job = start(cluster, "sh", "-c", "echo trains; exec sleep 600", grace_s=15)
    cluster.wait_for(job, "RUNNING")
    time.sleep(delay_s)
    asked = time.time()
    assert cluster.gpurun("cancel", job).code == 0
    finish(cluster, job)
    record(cancel_after_s=delay_s, took_s=at(cluster, job, "CANCELLED") - asked)
    assert at(cluster, job, "CANCELLED") - asked <= 8, "ranks that heed SIGTERM are gone at once; the grace is 15 s"


def test_a_cancel_waits_for_nothing_that_is_being_prepared(cluster):
    folder = cluster.folder / "recipe"
    for delay_s in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7):
        shutil.rmtree(folder, ignore_errors=True)
        job = start(cluster, "sleep", "600", grace_s=15)
        time.sleep(delay_s)
        state, asked = cluster.job(job)["state"], time.time()
        assert cluster.gpurun("cancel", job).code == 0
        finish(cluster, job)
        record(submitted_s=delay_s, state=state, took_s=at(cluster, job, "CANCELLED") - asked)
        assert at(cluster, job, "CANCELLED") - asked <= 8


def test_a_cancel_does_not_wait_for_code_that_takes_minutes_to_send(cluster):
    (cluster.folder / "code").mkdir()
    (cluster.folder / "code" / "weights").write_bytes(os.urandom(64 << 20))
    cluster.lab.shape("head", 4_000_000)
    try:
        job = start(cluster, "sleep", "600", grace_s=1, more="workdir: ../code\n")
        cluster.wait_for(job, "PREPARING")
        time.sleep(8)
        assert cluster.job(job)["state"] == "PREPARING"
        asked = time.time()
        assert cluster.gpurun("cancel", job).code == 0
        finish(cluster, job)
        record(code_mib=64, link_bps=4_000_000, took_s=at(cluster, job, "CANCELLED") - asked)
        assert at(cluster, job, "CANCELLED") - asked <= 10
    finally:
        cluster.lab.shape("head", 10_000_000_000)


TOLD = """
import os, signal, sys, time
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
def told(*_):
    print("told at", time.time(), flush=True)
    time.sleep(0.3)
    os._exit(143)
signal.signal(signal.SIGTERM, told)
print("trains", flush=True)
while rank != sys.argv[1] or not os.path.exists("/run/gpurun/fail"):
    time.sleep(0.05)
print("fails at", time.time(), flush=True)
os._exit(37)
"""


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize("rank", [0, 3], ids=["on the launcher's host", "on the other host"])
def test_without_a_supervisor_the_launcher_tells_ranks_on_every_host_once(cluster, launcher, rank):
    job = start(cluster, "python3", "-c", TOLD, str(rank), flags=LAUNCHERS[launcher], per_host=2)
    wait_until(lambda: cluster.log(job).count("trains") == 4)
    hosts = cluster.job(job)["hosts"]
    kill_supervisor(cluster, job)
    run = f"/home/train/.gpurun/jobs/{job}/run"
    cluster.lab.run(hosts[rank // 2], ["touch", f"{run}/fail"])

    def ends():
        listed = [cluster.lab.run(host, ["sh", "-c", f"cd {run}/ranks/1 && ls -d */end.*"]).stdout for host in hosts]
        return sorted(int(name.rpartition(".")[2]) for names in listed for name in names.decode().split())

    def launcher_lives():
        return f"gpurun-{job}-1".encode() in cluster.lab.run(hosts[0], ["docker", "ps"]).stdout

    wait_until(lambda: len(ends()) == 4 or (launcher == "mpi" and not launcher_lives()))
    # mpirun kills a second after its notice: on a busy machine the script has not noted each end by then.
    assert ends() == [37, 143, 143, 143] if launcher == "gloo" else set(ends()) - {143} == {37}
    cluster.gpurun("status", job)
    found = finish(cluster, job)
    assert (found["state"], found["exit_code"], found["first_failure"]["rank"]) == ("FAILED", 37, rank), found["reason"]
    lines = cluster.log(job).splitlines()
    (failed_s,) = [float(line.split()[-1]) for line in lines if "fails at" in line]
    told_s = [float(line.split()[-1]) - failed_s for line in lines if "told at" in line]
    record(job=job, launcher=launcher, rank=rank, told_s=str([round(each, 2) for each in told_s]))
    assert len(told_s) == 3, "each rank is told once, whoever tells it"
