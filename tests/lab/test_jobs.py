"""Whole jobs on real hosts, with real sshd, Docker and horovodrun: successes and failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from cluster import TINY, TRAIN, interrupt
from faulting import kill_supervisor

from gpurun.lab import engine

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("train")]

FAT = f"gpurun/fat-{os.getpid()}:1"
HOSTILE = ["a b", "c'd\"e", "line\nbreak", "", "$HOME `id` \\ * ü 💥", "--np", "-H", "; touch /tmp/x #"]
SHOW_ARGS = "import sys, json; print('ARGS', json.dumps(sys.argv[1:]), flush=True)"


def only_job(cluster):
    (record,) = cluster.status()["jobs"]
    return record


def test_allreduce_is_exact_over_gloo(cluster):
    done = cluster.gpurun("submit", "recipes/allreduce-check", "-i", str(cluster.inventory), "--follow")
    assert done.code == 0, done.err + done.out
    assert only_job(cluster)["exit_code"] == 0


def test_allreduce_is_exact_over_mpi(cluster):
    done = cluster.gpurun(
        "submit", "recipes/allreduce-check", "--controller", "mpi", "-i", str(cluster.inventory), "--follow"
    )
    assert done.code == 0, done.err + done.out


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_arguments_and_names_arrive_byte_for_byte(cluster, controller):
    name = "a'; touch /tmp/x #"
    done = cluster.submit(
        "--name", name, "--controller", controller, "-e", "ODD=x 'y' \"z\"",
        command=["python3", "-c", SHOW_ARGS, *HOSTILE],
    )  # fmt: skip
    assert done.code == 0, done.err
    shown = [json.loads(found) for found in re.findall(r"ARGS (\[.*\])", done.out)]
    assert shown == [HOSTILE, HOSTILE]
    assert only_job(cluster)["name"] == name


def test_the_first_rank_to_fail_is_named(cluster):
    script = "import os, sys, time; rank = os.environ['HOROVOD_RANK']; print('rank', rank, flush=True); " \
        "time.sleep(1); sys.exit(3 if rank == '1' else time.sleep(60))"  # fmt: skip
    done = cluster.submit(command=["python3", "-c", script])
    assert done.code == 1
    record = only_job(cluster)
    assert (record["state"], record["exit_code"]) == ("FAILED", 3)
    assert record["first_failure"]["rank"] == 1
    assert record["first_failure"]["host"] == record["hosts"][1]
    assert f"rank 1 on {record['hosts'][1]} failed first, with exit code 3" in done.err


def test_a_rank_killed_by_a_signal(cluster):
    script = "import os, time; os.kill(os.getpid(), 9) if os.environ['HOROVOD_RANK'] == '0' else time.sleep(60)"
    assert cluster.submit(command=["python3", "-c", script]).code == 1
    assert only_job(cluster)["exit_code"] == 137


def test_a_program_that_does_not_exist(cluster):
    done = cluster.submit(command=["no-such-program"])
    assert done.code == 2
    assert only_job(cluster)["exit_code"] == 127


ROTATES = {"log-driver": "json-file", "log-opts": {"max-size": "50k", "max-file": "2", "compress": "true"}}


@pytest.mark.parametrize("daemon", [ROTATES, {"log-driver": "none"}], ids=["rotates", "none"])
def test_every_line_arrives_whatever_the_hosts_engines_do_with_logs(cluster, daemon):
    lab = cluster.lab
    for host in lab.hosts:
        lab.run(host.name, ["tee", "/etc/docker/daemon.json"], stdin=json.dumps(daemon).encode())
        lab.crash(host.name)
        lab.boot(host.name)
    try:
        done = cluster.submit(command=["python3", "-c", "for i in range(20000): print('line', i, 'x' * 50)"])
        assert done.code == 0, done.err
        for rank in (0, 1):
            printed = cluster.gpurun("logs", only_job(cluster)["id"], "--rank", str(rank)).out.splitlines()
            assert [int(line.split()[1]) for line in printed] == list(range(20000))
    finally:
        for host in lab.hosts:
            lab.run(host.name, ["rm", "/etc/docker/daemon.json"])
            lab.crash(host.name)
            lab.boot(host.name)


def test_an_image_without_horovodrun(cluster):
    done = cluster.submit(image=TINY)
    assert done.code == 2
    assert f"the image {TINY} has no horovodrun" in done.err


def test_an_image_that_is_not_here(cluster):
    done = cluster.submit(image="no/such:image")
    assert done.code == 2
    assert "no/such:image is not on the head" in done.err
    assert cluster.status()["jobs"] == []


def test_a_secret_is_a_file_and_nowhere_else(cluster, tmp_path):
    (tmp_path / "token").write_text("hunter2-in-a-file")
    (tmp_path / "recipe.yaml").write_text(
        f"image: {TRAIN}\ngpus: 2\nsecrets: {{token: token}}\nconstraints: {{gpus_per_host: 1}}\n"
        "command: [sh, -c, 'wc -c </run/secrets/token; id -u']\n"
    )
    done = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory), "--follow")
    assert done.code == 0, done.err
    assert done.out.count("| 17") == 2
    assert "| 0\n" not in done.out, "ranks must not run as root"
    for path in cluster.home.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path


def test_outputs_come_home_and_are_there_again(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"image: {TRAIN}\ngpus: 2\noutputs: /out dir\nconstraints: {{gpus_per_host: 1}}\n"
        'command: [sh, -c, \'test "$HOROVOD_RANK" != 0 || echo model >"$GPURUN_OUTPUTS/ckpt 1"\']\n'
    )
    done = cluster.gpurun("submit", str(tmp_path), "-i", str(cluster.inventory), "--follow")
    assert done.code == 0, done.err
    job = only_job(cluster)["id"]
    assert (cluster.home / "jobs" / job / "outputs" / "ckpt 1").read_text() == "model\n"
    brought = cluster.gpurun("outputs", job, "--to", str(tmp_path / "brought"))
    assert (brought.code, (tmp_path / "brought/ckpt 1").read_text()) == (0, "model\n"), brought.err
    again = cluster.gpurun("outputs", job, "--to", str(tmp_path / "brought"))
    assert again.code == 2 and "something of that name" in again.err


def test_logs_of_one_rank(cluster):
    done = cluster.submit(command=["sh", "-c", "echo I am $HOROVOD_RANK"])
    assert done.code == 0, done.err
    job = only_job(cluster)["id"]
    assert cluster.gpurun("logs", job, "--rank", "1").out == "I am 1\n"
    assert "I am 0" in cluster.gpurun("logs", job[2:]).out
    assert cluster.gpurun("wait", job).code == 0


def test_a_time_limit_ends_the_gang(cluster):
    done = cluster.submit("--time-limit", "5s", command=["sleep", "600"])
    assert done.code == 1
    assert only_job(cluster)["state"] == "TIMED_OUT"


def test_ranks_get_notice_and_may_save(cluster):
    script = "trap 'echo saving; sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    job = cluster.gpurun(*cluster.submit_args(), "--", "sh", "-c", script).out.strip()
    cluster.wait_for_log(job, "ready")
    time.sleep(1)
    assert cluster.gpurun("cancel", job).code == 0
    assert cluster.job(job)["state"] == "CANCELLED"
    assert cluster.log(job).count("saved") == 2, cluster.log(job)


def test_what_does_not_fit_waits_and_starts_when_gpus_come_free(cluster):
    gpus = sum(host["gpus"] for host in cluster.status()["hosts"])
    per_host = ["--gpus-per-host", str(gpus // len(cluster.lab.hosts))]
    first = cluster.gpurun(*cluster.submit_args(*per_host, gpus=gpus), "--", "sleep", "5").out.strip()
    second = cluster.gpurun(*cluster.submit_args(), "--", "true").out.strip()
    assert cluster.job(second)["state"] == "QUEUED"
    assert cluster.gpurun("wait", first, second).code == 0


def test_a_queued_job_is_cancelled_at_once(cluster):
    gpus = sum(host["gpus"] for host in cluster.status()["hosts"])
    per_host = ["--gpus-per-host", str(gpus // len(cluster.lab.hosts))]
    first = cluster.gpurun(*cluster.submit_args(*per_host, gpus=gpus), "--", "sleep", "60").out.strip()
    second = cluster.gpurun(*cluster.submit_args(), "--", "true").out.strip()
    assert cluster.gpurun("cancel", second).code == 0
    assert cluster.job(second)["state"] == "CANCELLED"
    cluster.gpurun("cancel", first)


@pytest.mark.parametrize("state", ["QUEUED", "PREPARING", "STARTING", "RUNNING", "STOPPING"])
def test_ctrl_c_in_every_state(cluster, state):
    blocker = None
    if state == "QUEUED":
        gpus = sum(host["gpus"] for host in cluster.status()["hosts"])
        per_host = ["--gpus-per-host", str(gpus // len(cluster.lab.hosts))]
        blocker = cluster.gpurun(*cluster.submit_args(*per_host, gpus=gpus), "--", "sleep", "60").out.strip()
    command = ["true"] if state == "STOPPING" else ["sleep", "600"]
    process = cluster.start(*cluster.submit_args(), "--follow", "--", *command)
    job = process.stdout.readline().strip()
    cluster.wait_for(job, state)
    interrupt(process)
    _, err = process.communicate(timeout=120)
    # CPython ends by the signal itself if a handled interrupt came while `exec` ran a text, as for a dataclass.
    assert process.returncode in (130, -signal.SIGINT), err  # $? is 130 for both
    assert "Traceback" not in err
    assert cluster.job(job)["state"] in ("CANCELLED", "SUCCEEDED"), err
    if blocker:
        cluster.gpurun("cancel", blocker)


@pytest.mark.parametrize("waits", [("wait",), ("logs", "--follow"), ("cancel",)])
def test_whoever_waits_picks_up_a_job_whose_supervisor_was_killed(cluster, waits):
    """No other command comes along."""
    job = cluster.gpurun(*cluster.submit_args(), "--", "sleep", "8").out.strip()
    cluster.wait_for(job, "RUNNING")
    if waits == ("cancel",):
        kill_supervisor(cluster, job)
    process = cluster.start(waits[0], job, *waits[1:])
    time.sleep(1.5)
    if waits != ("cancel",):
        kill_supervisor(cluster, job)
    _, err = process.communicate(timeout=90)
    assert (process.returncode, [line for line in err.splitlines() if not line.startswith("waiting for ")]) == (0, [])
    assert cluster.job(job)["state"] == ("CANCELLED" if waits == ("cancel",) else "SUCCEEDED")


def broken_ssh_config(cluster, host, old, new):
    """An inventory whose ssh config is wrong for one host."""
    folder = cluster.folder / "broken"
    folder.mkdir()
    for name in ("inventory.yaml", "ssh_config", "known_hosts"):
        text = (
            (cluster.lab.folder / name)
            .read_text()
            .replace(str(cluster.lab.folder / "known_hosts"), f"{folder}/known_hosts")
        )
        (folder / name).write_text(text)
    blocks = (folder / "ssh_config").read_text().split("Host ")
    (folder / "ssh_config").write_text(
        "Host ".join(b.replace(old, new) if b.split("\n")[0].strip() == host else b for b in blocks)
    )
    cluster.inventory = folder / "inventory.yaml"
    return folder


def test_a_host_that_refuses_the_key(cluster):
    host = cluster.lab.hosts[0].name
    folder = broken_ssh_config(cluster, host, f"{cluster.lab.folder}/id_ed25519", str(cluster.folder / "other"))
    shutil.copy(next(folder.parent.glob("broken/known_hosts")), folder / "unused")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", cluster.folder / "other"], check=True)
    done = cluster.submit(gpus=4)
    assert done.code == 4
    assert host in done.err
    assert re.search("refused|authentication|key", done.err, re.IGNORECASE)
    cluster.inventory = cluster.lab.inventory


def test_a_host_whose_key_changed_is_never_connected(cluster):
    host = cluster.lab.hosts[1]
    folder = broken_ssh_config(cluster, host.name, "", "")
    lines = (folder / "known_hosts").read_text().splitlines()
    other = next(line for line in lines if str(host.address) not in line)
    mine = next(line for line in lines if str(host.address) in line)
    forged = mine.split(" ")[0] + " " + " ".join(other.split(" ")[1:])
    (folder / "known_hosts").write_text("\n".join(forged if line == mine else line for line in lines) + "\n")
    done = cluster.submit(gpus=4)
    assert done.code == 4
    assert done.err.count("SHA256:") >= 2
    assert "inventory trust" in done.err
    cluster.inventory = cluster.lab.inventory


def test_a_host_without_docker(cluster):
    host = cluster.lab.hosts[2].name
    cluster.lab.run(host, ["mv", "/run/docker.sock", "/run/docker.away"])
    try:
        done = cluster.submit(gpus=4)
    finally:
        cluster.lab.run(host, ["mv", "/run/docker.away", "/run/docker.sock"])
    assert done.code == 4
    assert f"{host}: " in done.err
    assert "Docker" in done.err


def test_a_disk_that_fills_up_while_shipping(cluster, tmp_path):
    """An image of 128 MiB that no host has, and one host with 60 MiB of disk left: refused before, or in the load."""
    (tmp_path / "noise").write_bytes(os.urandom(128 << 20))
    (tmp_path / "Dockerfile").write_text(f"FROM {TINY}\nCOPY noise /noise\n")
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    subprocess.run(["docker", "build", "-q", "-t", FAT, str(tmp_path)], env=environ, check=True, capture_output=True)
    host = cluster.lab.hosts[3].name
    root = cluster.lab.run(host, ["docker", "info", "-f", "{{.DockerRootDir}}"]).stdout.decode().strip()
    free = int(cluster.lab.run(host, ["df", "--output=avail", "-B1", root]).stdout.split()[-1])
    filler = f"{root}/filler"
    cluster.lab.run(host, ["fallocate", "-l", str(free - (60 << 20)), filler])
    try:
        done = cluster.submit(gpus=4, image=FAT)
    finally:
        cluster.lab.run(host, ["rm", "-f", filler])
        for each in cluster.lab.hosts:
            cluster.lab.run(each.name, ["docker", "rmi", "-f", FAT])
        subprocess.run(["docker", "rmi", "-f", FAT], env=environ, check=True, capture_output=True)
    assert done.code == 4, done.err
    assert host in done.err
    assert re.search("disk|space", done.err)
