"""Whole jobs on real hosts, with real sshd, Docker and horovodrun: successes and failures."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest
from at_once import at, finish, hosts_of, printed, reach, start, tell
from cluster import SHELL, TINY, TRAIN, interrupt
from faulting import events, is_adopted, kill_supervisor
from waiting import LIMIT_S, until

from gpurun.node.agent.processes import list_processes

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("jobs")]


@pytest.mark.parametrize(
    ("controller", "per_host"), [pytest.param("gloo", 1, marks=pytest.mark.story), ("mpi", 2)], ids=["gloo", "mpi"]
)
def test_allreduce_is_exact(cluster, controller, per_host):
    """On two hosts."""
    flags = ("--controller", controller, "-n", str(2 * per_host), "--gpus-per-host", str(per_host))
    done = cluster.gpurun(
        "submit", "recipes/allreduce-check", *flags, "-i", str(cluster.inventory), "--follow", timeout_s=LIMIT_S
    )
    assert done.code == 0, done.err + done.out
    by_mpi = "25 by MPI" if controller == "mpi" else r"none by MPI \(not started by mpirun\)"
    where = rf"rank (\d) of {2 * per_host}, local \d of {per_host} on \S+"
    found = re.findall(rf"{where}: 31 reductions by Horovod, {by_mpi}: all exact", done.out)
    assert sorted(found) == [str(rank) for rank in range(2 * per_host)], done.out


FAILS = """
if test $GPURUN_RANK = {rank}; then
  ( until [ -e /run/gpurun/fail ]; do sleep 0.1; done; echo about to end; {kills} ) &
fi
{runs}
"""
RING = "ring --steps 4000 --step-s 0.1"
CRASHES = FAILS.format(
    rank=0, kills="kill -SEGV $$", runs=f"test $GPURUN_RANK != 0 || exec {RING}; {RING} || sleep 3; exit 1"
)
"""Rank 0 crashes. The others lose their neighbour, and fail for that reason 3 s later."""
EXITS = FAILS.format(rank=1, kills="kill -USR1 $$", runs=f"{RING} & trap 'echo no such layer; exit 7' USR1; wait; wait")
"""Rank 1 fails by itself. Its child and the other rank train on."""


@pytest.mark.story
def test_the_first_rank_to_fail_is_named_with_its_host_exit_code_and_last_lines(cluster):
    followed = cluster.start(
        *cluster.submit_args("--launcher", "tasks", image=TINY), "--follow", "--", "sh", "-c", EXITS
    )
    exits = followed.stdout.readline().strip()
    crashes = start(cluster, "tasks", "sh", "-c", CRASHES, gpus=4)
    for job, rank in ((exits, 1), (crashes, 0)):
        cluster.wait_for_log(job, "step 3 ")
        tell(cluster, job, hosts_of(cluster.record(job))[rank], "fail")
    _, err = followed.communicate(timeout=LIMIT_S)
    for job, rank, code, last in ((exits, 1, 7, "no such layer"), (crashes, 0, 139, "about to end")):
        found = finish(cluster, job, "FAILED", code)
        host = hosts_of(found)[rank]
        assert (found["first_failure"]["rank"], found["first_failure"]["host"]) == (rank, host), found
        assert found["reason"].startswith(f"rank {rank} on {host} failed first, with exit code {code}"), found
        assert any(line.endswith(last) for line in found["first_failure"]["excerpt"]), found
    assert followed.returncode == 1
    assert f"rank 1 on {hosts_of(cluster.record(exits))[1]} failed first, with exit code 7" in err


SAVES = (
    "trap 'echo saving; sleep 0.5; echo saved; echo whole >/out/saved; exit' TERM; echo up; while :; do sleep 0.1; done"
)


def test_a_file_that_gitignore_hid_is_named_and_a_program_that_prints_into_a_pipe_saves(cluster):
    top = cluster.folder / "hidden"
    for name, text in (("data/train.csv", "1,2"), (".git/HEAD", ""), (".gitignore", "data/\n"), ("save.sh", SAVES)):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    lacks = start(cluster, "tasks", "sh", "-c", "cat data/train.csv", workdir=str(top))
    flags = ("--grace", "60s", "--shm-size", "64MiB")
    piped = "sh save.sh | tee /tmp/log; true"
    saves = start(cluster, "tasks", "sh", "-c", piped, workdir=str(top), outputs="/out", gpus=1, flags=flags)
    found = finish(cluster, lacks, "FAILED", 1)
    assert "the workdir has data on the head, but .gitignore excludes data" in found["reason"], found
    cluster.wait_for_log(saves, "up")
    assert cluster.gpurun("cancel", saves).code == 0
    finish(cluster, saves, "CANCELLED")
    assert (cluster.home / "jobs" / saves / "outputs/saved").read_text() == "whole\n", cluster.log(saves)
    assert "saved" in cluster.log(saves)


ENGINES = [{"log-driver": "json-file", "log-opts": {"max-size": "50k", "max-file": "2", "compress": "true"}},
           {"log-driver": "none"}]  # fmt: skip


def test_every_line_arrives_whatever_the_hosts_engines_do_with_logs(cluster):
    """Two hosts rotate their containers' logs, two keep none; a gang of horovodrun runs on each pair."""
    lab, hosts = cluster.lab, [host.name for host in cluster.lab.hosts]
    for number, host in enumerate(hosts):
        daemon = json.dumps(ENGINES[number // 2]).encode()
        lab.run(host, ["tee", "/etc/docker/daemon.json"], stdin=daemon)
        lab.crash(host)
        lab.boot(host)
    try:
        script = "for i in range(20000): print('line', i, 'x' * 50)"
        pairs = (",".join(hosts[:2]), ",".join(hosts[2:]))
        for job in [start(cluster, "gloo", "python3", "-c", script, flags=("--host", pair)) for pair in pairs]:
            finish(cluster, job, "SUCCEEDED", 0)
            for rank in (0, 1):
                assert [int(line.split()[1]) for line in printed(cluster, job, rank)] == list(range(20000))
    finally:
        for host in hosts:
            lab.run(host, ["rm", "/etc/docker/daemon.json"])
            lab.crash(host)
            lab.boot(host)


ODD_NAME = "it's;true"


def test_what_an_image_lacks_is_named_before_and_after_the_start(cluster):
    done = cluster.submit(image="no/such:image")
    assert done.code == 2
    assert "no/such:image is not on the head" in done.err
    assert not (cluster.home / "jobs").exists() or not list((cluster.home / "jobs").glob("j-*"))
    cases = [
        ("torchrun", SHELL, "train.py", "python3"), ("tensorflow", SHELL, "python3", "python3"),
        ("mpirun", SHELL, "true", "mpirun"), ("horovod", SHELL, "true", "horovodrun"),
        ("tasks", SHELL, ODD_NAME, ODD_NAME), ("horovod", TRAIN, ODD_NAME, ODD_NAME),
    ]  # fmt: skip
    jobs = [
        start(cluster, "tasks", command, flags=("--launcher", launcher), gpus=1, image=image)
        for launcher, image, command, _ in cases
    ]
    for job, (launcher, image, _, lacks) in zip(jobs, cases, strict=True):
        found = finish(cluster, job, "FAILED", 127)
        assert found["reason"].startswith(f"the image {image} has no {lacks}"), (launcher, found["reason"])
    assert cluster.gpurun("wait", jobs[0]).code == 2


@pytest.mark.story
def test_a_secret_is_a_file_and_nowhere_else_and_outputs_and_logs_come_home(cluster, tmp_path):
    secret = b"hunter2-in-a-file"
    (tmp_path / "token").write_bytes(secret)
    script = (
        "wc -c </run/secrets/token; echo uid $(id -u); echo rank $GPURUN_RANK\n"
        'test $GPURUN_RANK != 0 || echo model >"$GPURUN_OUTPUTS/ckpt 1"\n'
        "until [ -e /run/gpurun/go ]; do sleep 0.1; done"
    )
    job = start(cluster, "tasks", "sh", "-c", script, secrets={"token": "../token"}, outputs="/out dir", name="keeps")
    cluster.wait_for_log(job, "rank 0")
    cluster.wait_for_log(job, "rank 1")
    assert secret not in subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True).stdout
    for host in hosts_of(cluster.record(job)):
        look = "docker inspect $(docker ps -aq); ps -eo args; cat /proc/[0-9]*/environ"
        shown = cluster.lab.run(host, ["sh", "-c", look]).stdout
        assert job.encode() in shown and secret not in shown
        tell(cluster, job, host, "go")
    finish(cluster, job, "SUCCEEDED", 0)
    for rank in (0, 1):
        size, user, number = printed(cluster, job, rank)
        assert (size, number) == (b"%d" % len(secret), b"rank %d" % rank)
        assert user != b"uid 0", "ranks must not run as root"
    for path in cluster.home.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path
    assert (cluster.home / "jobs" / job / "outputs" / "ckpt 1").read_text() == "model\n"
    brought = cluster.gpurun("outputs", job, "--to", str(tmp_path / "brought"))
    assert (brought.code, (tmp_path / "brought/ckpt 1").read_text()) == (0, "model\n"), brought.err
    assert cluster.gpurun("logs", job[2:], "--rank", "1").out.splitlines()[-1] == "rank 1"


@pytest.mark.story
def test_a_gang_waits_until_all_its_gpus_are_free_and_a_queued_job_is_cancelled_at_once(cluster):
    """The gang that waited ends by its time limit."""
    holds = start(cluster, "tasks", "sleep", "600", gpus=8, per_host=2)
    waits = start(cluster, "tasks", "sleep", "600", gpus=4, flags=("--time-limit", "2s"))
    queued = start(cluster, "tasks", "true", gpus=1)
    assert cluster.gpurun("cancel", queued).code == 0
    assert finish(cluster, queued, "CANCELLED")["started_s"] is None
    cluster.wait_for(holds, "RUNNING")
    assert cluster.record(waits)["state"] == "QUEUED"
    assert cluster.gpurun("cancel", "--no-wait", holds).code == 0
    assert len(hosts_of(finish(cluster, waits, "TIMED_OUT"))) == 4
    finish(cluster, holds, "CANCELLED")
    granted = next(event["t"] for event in events(cluster, waits) if event["kind"] == "placement")
    assert at(cluster, holds, "STOPPING") <= granted


def test_ctrl_c_in_every_state(cluster):
    def followed(*command, gpus=2, per_host=1):
        args = cluster.submit_args("--launcher", "tasks", "--gpus-per-host", str(per_host), gpus=gpus, image=TINY)
        process = cluster.start(*args, "--follow", "--", *command)
        return process, process.stdout.readline().strip()

    def ends(process, job):
        _, err = process.communicate(timeout=LIMIT_S)
        # CPython ends by the signal itself if a handled interrupt came while `exec` ran a text, as for a dataclass.
        assert process.returncode in (130, -signal.SIGINT), err  # $? is 130 for both
        assert "Traceback" not in err
        assert cluster.record(job)["state"] in ("CANCELLED", "SUCCEEDED"), err

    runs = followed("sleep", "600")
    interrupted = []
    for state in ("PREPARING", "STARTING", "STOPPING"):
        process, job = followed(*(("true",) if state == "STOPPING" else ("sleep", "600")))
        reach(cluster, job, state)
        interrupt(process)
        interrupted.append((process, job))
    reach(cluster, runs[1], "RUNNING")
    waits = followed("true", gpus=8, per_host=2)
    assert cluster.record(waits[1])["state"] == "QUEUED"
    for process, job in (waits, runs):
        interrupt(process)
        interrupted.append((process, job))
    for process, job in interrupted:
        ends(process, job)


TRAINS = "echo trains; until [ -e /run/gpurun/go ]; do sleep 0.1; done; echo done"


@pytest.mark.story
def test_whoever_waits_replaces_a_supervisor_that_was_killed(cluster):
    """Each command waits alone: no other command comes along. The ranks end while no supervisor lives."""
    args = cluster.submit_args("--launcher", "tasks", image=TINY)
    waits = cluster.start(*args, "--follow", "--", "sh", "-c", TRAINS)
    job = waits.stdout.readline().strip()
    cluster.wait_for_log(job, "trains", times=2)

    def is_carried():
        return is_adopted(cluster, job) and any(
            f"gpurun.supervisor {job} " in each.command for each in list_processes()
        )

    for following in (("logs", "--follow", job), ("wait", job), None):
        kill_supervisor(cluster, job)
        until(is_carried)
        waits.kill()
        waits.communicate()
        if following is not None:
            waits = cluster.start(*following)
            line = waits.stderr if following[0] == "wait" else waits.stdout  # `wait` says after 5 s that it waits
            assert line.readline()
    kill_supervisor(cluster, job)
    hosts = hosts_of(cluster.record(job))
    for host in hosts:
        tell(cluster, job, host, "go")
    ended = f"test -e /home/train/.gpurun/jobs/{job}/run/ranks/1/*/end.0"
    for host in hosts:
        until(lambda host=host: cluster.lab.run(host, ["sh", "-c", ended]).code == 0)
    assert not is_adopted(cluster, job)
    assert cluster.gpurun("wait", job).code == 0
    assert [printed(cluster, job, rank) for rank in (0, 1)] == [[b"trains", b"done"]] * 2
    other = start(cluster, "tasks", "sleep", "600")
    cluster.wait_for(other, "RUNNING")
    kill_supervisor(cluster, other)
    assert cluster.gpurun("cancel", other).code == 0
    assert cluster.record(other)["state"] == "CANCELLED"


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


def cannot_start(cluster, **wants):
    """Submit a gang that needs every host, and cancel it once it waits for a broken one; why it waits."""
    job = start(cluster, "tasks", "true", gpus=4, **wants)
    until(lambda: cluster.record(job)["placements"] >= 1 and cluster.record(job)["state"] == "QUEUED")
    found = cluster.record(job)
    assert cluster.gpurun("cancel", job).code == 0
    assert found["restarts"] == 0
    return found["reason"]


def test_a_host_that_refuses_the_key(cluster):
    host = cluster.lab.hosts[0].name
    broken_ssh_config(cluster, host, f"{cluster.lab.folder}/id_ed25519", str(cluster.folder / "other"))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", cluster.folder / "other"], check=True)
    reason = cannot_start(cluster)
    assert host in reason
    assert re.search("refused|authentication|key", reason, re.IGNORECASE)
    cluster.inventory = cluster.lab.inventory


@pytest.mark.story
def test_a_host_whose_key_changed_is_never_connected(cluster):
    host = cluster.lab.hosts[1]
    folder = broken_ssh_config(cluster, host.name, "", "")
    lines = (folder / "known_hosts").read_text().splitlines()
    other = next(line for line in lines if str(host.address) not in line)
    mine = next(line for line in lines if str(host.address) in line)
    forged = mine.split(" ")[0] + " " + " ".join(other.split(" ")[1:])
    (folder / "known_hosts").write_text("\n".join(forged if line == mine else line for line in lines) + "\n")
    reason = cannot_start(cluster)
    assert reason.count("SHA256:") >= 2
    assert "inventory trust" in reason
    cluster.inventory = cluster.lab.inventory


def test_a_host_without_docker_is_named_and_the_gang_waits_for_a_better_host(cluster):
    """`tests/supervisor/test_unstarted.py` has what else may follow."""
    host = cluster.lab.hosts[2].name
    cluster.lab.run(host, ["mv", "/run/docker.sock", "/run/docker.away"])
    try:
        job = start(cluster, "tasks", "true", gpus=4)
        until(lambda: cluster.record(job).get("placements") == 1, lambda: cluster.record(job))
        found = cluster.wait_for(job, "QUEUED")
    finally:
        cluster.lab.run(host, ["mv", "/run/docker.away", "/run/docker.sock"])
    assert f"{host}: " in found["reason"]
    assert "Docker" in found["reason"]
    finish(cluster, job, "SUCCEEDED", 0)
