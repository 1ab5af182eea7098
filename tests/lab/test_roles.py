"""Gangs whose ranks have roles: each listens at its announced address; some only serve until the others end."""

from __future__ import annotations

import re
import shutil
import time

import pytest
import yaml
from cluster import TINY, TRAIN, Cluster
from faulting import kill_rank

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("launchers")]

SERVES = """
import json, os, socket, sys, time
import gpurun_runtime
told = json.loads(os.environ['TF_CONFIG'])
cluster, role, index = told['cluster'], told['task']['type'], told['task']['index']
gang = gpurun_runtime.gang()
assert (gang.role, gang.role_index) == (role, index) and {**gang.roles, **cluster} == gang.roles, gang
port = int(cluster[role][index].split(':')[1])
server = socket.create_server(('', port))
print(f"{role} {index} is rank {gang.rank} of {gang.size} on {gang.hosts[gang.node]}:{port}, "
      f"GPU {os.environ['CUDA_VISIBLE_DEVICES']!r}", flush=True)
others = [each for where in cluster.values() for each in where if each != cluster[role][index]]
while role == 'chief' and others:
    host, port = others[0].split(':')
    try:
        socket.create_connection((host, int(port))).close()
        others.pop(0)
    except OSError:
        time.sleep(0.1)
if role == 'chief':
    print('all answer', flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit(int(sys.argv[2]))
time.sleep(600)
"""


def recipe(folder, roles, *, image=TRAIN, gpus=4, per_host=1, extra=""):
    """A recipe of a gang with roles."""
    folder.mkdir(exist_ok=True)
    (folder / "serves.py").write_text(SERVES)
    (folder / "recipe.yaml").write_text(
        f"image: {image}\nlauncher: tensorflow\ngpus: {gpus}\nroles: {roles}\nworkdir: .\n"
        f"command: [serves.py, '0', '0']\ngrace: 3s\nconstraints: {{gpus_per_host: {per_host}}}\n{extra}"
    )
    return str(folder)


def submit(cluster, path, *command):
    done = cluster.gpurun("submit", path, "-i", str(cluster.inventory), *(["--", *command] if command else []))
    assert done.code == 0, done.err
    return done.out.strip()


def seats_in(log):
    """(role, index) → (rank, host, port, GPU), as the ranks themselves say."""
    said = re.findall(r"(\w+) (\d) is rank (\d) of \d on (\S+):(\d+), GPU '(\d*)'", log)
    return {(role, int(index)): (int(rank), host, int(port), gpu) for role, index, rank, host, port, gpu in said}


def only_job(cluster):
    (record,) = cluster.status()["jobs"]
    return record


@pytest.fixture
def served(train_lab, tmp_path):
    """The last host of the lab has no GPU, no NVIDIA driver and no toolkit, and is labelled for parameter servers."""
    cluster = Cluster(train_lab, tmp_path)
    ignored = shutil.ignore_patterns("hosts", "*.sock")
    shutil.copytree(train_lab.inventory.parent, tmp_path / "inventory", ignore=ignored)
    cluster.inventory = tmp_path / "inventory" / train_lab.inventory.name
    written = yaml.safe_load(cluster.inventory.read_text())
    server = train_lab.hosts[-1].name
    for rack in written["racks"].values():
        if server in rack["hosts"]:
            rack["hosts"][server] = {"gpus": 0, "generation": "none", "labels": {"role": "ps"}}
    cluster.inventory.write_text(yaml.safe_dump(written))
    hide = (
        "for f in $(find /usr -name libnvidia-ml.so.1 -o -name nvidia-container-runtime-hook); do mv $f $f.gone; done"
    )
    show = "for f in $(find /usr -name '*.gone'); do mv $f ${f%.gone}; done"
    train_lab.run(server, ["sh", "-c", hide])
    yield cluster, server
    train_lab.run(server, ["sh", "-c", show])
    cluster.cancel_all()
    cluster.assert_nothing_left()


def test_servers_run_on_a_host_without_gpus_which_two_gangs_share(served, tmp_path):
    cluster, server = served
    roles = "{ps: 2, ps_hosts: [role=ps]}"
    jobs = [
        submit(cluster, recipe(tmp_path / name, roles, gpus=3, extra="name: " + name), "serves.py", "8", "0")
        for name in "ab"
    ]
    for job in jobs:
        cluster.wait_for_log(job, "all answer")
        assert cluster.job(job)["hosts"][-1] == server
        on = {name: seat[1] for name, seat in seats_in(cluster.log(job)).items()}
        assert {name for name, host in on.items() if host == server} == {("ps", 0), ("ps", 1)}, on
    assert all(cluster.gpurun("wait", job).code == 0 for job in jobs), cluster.log(jobs[0])
    assert cluster.gpurun("inventory", "cordon", server, "-i", str(cluster.inventory), "--reason", "fan").code == 0
    waits = submit(cluster, recipe(tmp_path / "c", roles, gpus=1))
    why = cluster.gpurun("why", waits)
    assert "parameter servers need a host without GPUs (role=ps), and none can be used: cordoned" in why.out, why
    assert cluster.gpurun("inventory", "uncordon", server, "-i", str(cluster.inventory)).code == 0
    assert cluster.gpurun("wait", waits, "--timeout", "60").code == 0


def test_a_server_that_is_killed_on_its_own_host_is_named(served, tmp_path):
    cluster, server = served
    path = recipe(tmp_path / "r", "{ps: 1, ps_hosts: [role=ps]}", gpus=2)
    job = submit(cluster, path, "serves.py", "600", "0")
    cluster.wait_for_log(job, "all answer")
    kill_rank(cluster, job, 3)
    record = cluster.wait_for(job, "FAILED")
    assert f"ps 0 (rank 3) on {server} failed first, with exit code 137" in record["reason"]


def test_servers_and_workers_are_ended_once_the_chief_has_returned_0(cluster, tmp_path):
    began = time.monotonic()
    job = submit(cluster, recipe(tmp_path / "r", "{ps: 2, evaluator: true}"))
    assert cluster.gpurun("wait", job).code == 0
    record, log = cluster.job(job), cluster.log(job)
    assert (record["state"], record["exit_code"]) == ("SUCCEEDED", 0)
    assert time.monotonic() - began < 120
    seats = seats_in(log)
    assert {name: seat[0] for name, seat in seats.items()} == {
        **{("worker", number): number for number in range(4)}, ("chief", 0): 4, ("ps", 0): 5, ("ps", 1): 6,
        ("evaluator", 0): 7,
    }  # fmt: skip
    hosts = record["hosts"]
    assert [seats["worker", index][1] for index in range(4)] == hosts
    assert seats["chief", 0][1] == seats["evaluator", 0][1] == hosts[0]
    assert {seats["ps", 0][1], seats["ps", 1][1]} == {hosts[1], hosts[3]}, "one in each rack"
    assert {name[0] for name, seat in seats.items() if seat[3]} == {"worker"}
    assert "all answer" in log


def test_two_gangs_on_the_same_hosts_share_no_port(cluster, tmp_path):
    paths = [recipe(tmp_path / name, "{ps: 4}") for name in "ab"]
    jobs = [submit(cluster, path, "serves.py", "8", "0") for path in paths]
    for job in jobs:
        cluster.wait_for_log(job, "all answer")
    assert [cluster.job(job)["state"] for job in jobs] == ["RUNNING", "RUNNING"]
    assert all(cluster.gpurun("wait", job).code == 0 for job in jobs)
    ports = [{seat[1:3] for seat in seats_in(cluster.log(job)).values()} for job in jobs]
    assert [len(each) for each in ports] == [9, 9]
    assert not ports[0] & ports[1]


@pytest.mark.parametrize(("name", "rank"), [("worker 1", 1), ("ps 1", 4), ("chief 0", 2)])
def test_a_rank_that_is_killed_before_the_end_is_named_by_its_role(cluster, tmp_path, name, rank):
    job = submit(cluster, recipe(tmp_path / "r", "{ps: 2}", gpus=2), "serves.py", "600", "0")
    cluster.wait_for_log(job, "all answer")
    seat = seats_in(cluster.log(job))[name.split()[0], int(name.split()[1])]
    kill_rank(cluster, job, rank)
    cluster.wait_for(job, "FAILED")
    record = cluster.job(job)
    failure = record["first_failure"]
    assert (failure["rank"], failure["host"], record["exit_code"]) == (rank, seat[1], 137)
    assert f"{name} (rank {rank}) on {seat[1]} failed first, with exit code 137" in record["reason"]
    said = cluster.gpurun("logs", job, "--rank", str(rank))
    assert said.out.count("is rank") == 1 and f"{name} is rank {rank}" in said.out


def test_a_chief_that_fails_is_the_first_cause_whatever_the_others_do(cluster, tmp_path):
    done = cluster.gpurun(
        "submit", recipe(tmp_path / "r", "{ps: 1}", gpus=2), "-i", str(cluster.inventory), "--follow", "--",
        "serves.py", "1", "7",
    )  # fmt: skip
    assert done.code == 1
    record = only_job(cluster)
    assert (record["exit_code"], record["first_failure"]["rank"]) == (7, 2)
    assert "chief 0 (rank 2)" in done.err


def test_without_a_chief_all_workers_must_return_0_and_flags_name_everybody(cluster, tmp_path):
    path = recipe(tmp_path / "r", "{ps: 1, flags: true}", image=TINY, gpus=2)
    command = 'echo "$GPURUN_ROLE $GPURUN_ROLE_INDEX got $*"; test $GPURUN_ROLE = worker || sleep 600'
    job = submit(cluster, path, "sh", "-c", command, "sh", "--own")
    assert cluster.gpurun("wait", job).code == 0, cluster.log(job)
    for role, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        want = rf"{role} {index} got --own --ps_hosts=10\S+:\d+ --worker_hosts=10\S+:\d+,10\S+:\d+ --job_name={role} "
        assert re.search(want + rf"--task_index={index}\b", cluster.log(job)), cluster.log(job)


def test_an_image_without_python_is_named_in_the_report(cluster, tmp_path):
    done = cluster.gpurun(
        "submit", recipe(tmp_path / "r", "{ps: 1}", image=TINY, gpus=2), "-i", str(cluster.inventory), "--follow"
    )
    assert done.code == 2
    failure = only_job(cluster)["first_failure"]
    assert failure["exit_code"] == 127 and any("python3" in line for line in failure["excerpt"]), failure
