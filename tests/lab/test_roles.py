"""Gangs whose ranks have roles: each listens at its announced address; some only serve until the others end."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml
from at_once import finish, hosts_of, tell
from cluster import SHELL, TINY, Cluster
from faulting import kill_rank

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("roles")]

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
    while not os.path.exists('/run/gpurun/go'):
        time.sleep(0.1)
    sys.exit(int(sys.argv[1]))
time.sleep(600)
"""


def recipe(folder, roles, *, image=TINY, gpus=4, per_host=1, extra=""):
    """A recipe of a gang with roles."""
    folder.mkdir(exist_ok=True)
    (folder / "serves.py").write_text(SERVES)
    (folder / "recipe.yaml").write_text(
        f"image: {image}\nlauncher: tensorflow\ngpus: {gpus}\nroles: {roles}\nworkdir: .\n"
        f"command: [serves.py, '0']\ngrace: 3s\nconstraints: {{gpus_per_host: {per_host}}}\n{extra}"
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


def wait_for_all(cluster, *jobs):
    """Wait until each job's chief has connected to all others."""
    for job in jobs:
        cluster.wait_for_log(job, "all answer")


def let_chief_return(cluster, job):
    _, host, _, _ = seats_in(cluster.log(job))["chief", 0]
    tell(cluster, job, host, "go")


def test_servers_run_on_a_host_without_gpus_which_two_gangs_share(served, tmp_path):
    """In one gang the chief returns 0; in the other one a server is killed, and is named."""
    cluster, server = served
    roles = "{ps: 2, ps_hosts: [role=ps]}"
    succeeds, fails = jobs = [
        submit(cluster, recipe(tmp_path / name, roles, gpus=3, extra="name: " + name)) for name in "ab"
    ]
    wait_for_all(cluster, *jobs)
    for job in jobs:
        assert hosts_of(cluster.record(job))[-1] == server
        on = {name: seat[1] for name, seat in seats_in(cluster.log(job)).items()}
        assert {name for name, host in on.items() if host == server} == {("ps", 0), ("ps", 1)}, on
    assert cluster.gpurun("inventory", "cordon", server, "-i", str(cluster.inventory), "--reason", "fan").code == 0
    let_chief_return(cluster, succeeds)
    finish(cluster, succeeds, "SUCCEEDED", 0)
    rank = seats_in(cluster.log(fails))["ps", 1][0]
    kill_rank(cluster, fails, rank)
    reason = finish(cluster, fails, "FAILED")["reason"]
    assert f"ps 1 (rank {rank}) on {server} failed first, with exit code 137" in reason
    waits = submit(cluster, recipe(tmp_path / "c", roles, gpus=1))
    why = cluster.gpurun("why", waits)
    assert "parameter servers need a host without GPUs (role=ps), and none can be used: cordoned" in why.out, why
    assert cluster.gpurun("inventory", "uncordon", server, "-i", str(cluster.inventory)).code == 0
    wait_for_all(cluster, waits)
    let_chief_return(cluster, waits)
    finish(cluster, waits, "SUCCEEDED", 0)


def test_two_gangs_on_the_same_hosts_share_no_port_and_end_once_their_chiefs_have_returned_0(cluster, tmp_path):
    jobs = [submit(cluster, recipe(tmp_path / name, "{ps: 2, evaluator: true}")) for name in "ab"]
    wait_for_all(cluster, *jobs)
    ports = []
    for job in jobs:
        hosts, seats = hosts_of(cluster.record(job)), seats_in(cluster.log(job))
        assert {name: seat[0] for name, seat in seats.items()} == {
            **{("worker", number): number for number in range(4)}, ("chief", 0): 4, ("ps", 0): 5, ("ps", 1): 6,
            ("evaluator", 0): 7,
        }  # fmt: skip
        assert [seats["worker", index][1] for index in range(4)] == hosts
        assert seats["chief", 0][1] == seats["evaluator", 0][1] == hosts[0]
        assert {seats["ps", 0][1], seats["ps", 1][1]} == {hosts[1], hosts[3]}, "one in each rack"
        assert {name[0] for name, seat in seats.items() if seat[3]} == {"worker"}
        ports.append({seat[1:3] for seat in seats.values()})
        assert cluster.record(job)["state"] == "RUNNING"
    assert [len(each) for each in ports] == [8, 8]
    assert not ports[0] & ports[1]
    for job in jobs:
        let_chief_return(cluster, job)
    for job in jobs:
        finish(cluster, job, "SUCCEEDED", 0)


def test_a_rank_that_ends_before_the_end_is_named_by_its_role(cluster, tmp_path):
    """Three gangs each lose another role by a signal; in a fourth, the chief fails by itself."""
    killed = {"worker 1": 1, "ps 1": 4, "chief 0": 2}
    jobs = {
        name: submit(cluster, recipe(tmp_path / name.replace(" ", ""), "{ps: 2}", gpus=2)) for name in killed
    }  # fmt: skip
    fails = submit(cluster, recipe(tmp_path / "fails", "{ps: 1}", gpus=2), "serves.py", "7")
    wait_for_all(cluster, *jobs.values(), fails)
    let_chief_return(cluster, fails)
    for name, rank in killed.items():
        kill_rank(cluster, jobs[name], rank)
    found = finish(cluster, fails, "FAILED", 7)
    assert found["reason"].startswith("chief 0 (rank 2)")
    for name, rank in killed.items():
        job = jobs[name]
        found = finish(cluster, job, "FAILED", 137)
        seat = seats_in(cluster.log(job))[name.split()[0], int(name.split()[1])]
        assert (found["first_failure"]["rank"], found["first_failure"]["host"]) == (rank, seat[1])
        assert f"{name} (rank {rank}) on {seat[1]} failed first, with exit code 137" in found["reason"]
    said = cluster.gpurun("logs", jobs["ps 1"], "--rank", "4")
    assert said.out.count("is rank") == 1 and "ps 1 is rank 4" in said.out


def test_without_a_chief_all_workers_must_return_0_and_flags_name_everybody(cluster, tmp_path):
    path = recipe(tmp_path / "r", "{ps: 1, flags: true}", image=SHELL, gpus=2)
    command = 'echo "$GPURUN_ROLE $GPURUN_ROLE_INDEX got $*"; test $GPURUN_ROLE = worker || sleep 600'
    job = submit(cluster, path, "sh", "-c", command, "sh", "--own")
    finish(cluster, job, "SUCCEEDED", 0)
    for role, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        want = rf"{role} {index} got --own --ps_hosts=10\S+:\d+ --worker_hosts=10\S+:\d+,10\S+:\d+ --job_name={role} "
        assert re.search(want + rf"--task_index={index}\b", cluster.log(job)), cluster.log(job)
