"""Hosts with another Python, another Docker, or shared home folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import LOOK_S, TINY, Cluster, Done
from other_engines import REMAPPED, ROOTLESS, other_engine
from waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("real_hosts")]

LEAVES = "id -u; echo from $GPURUN_RANK > /checkpoints/$GPURUN_RANK; sleep 300 & echo rank $GPURUN_RANK; exit {code}"


def arranged(cluster: Cluster, hosts: int = 1, **settings: str) -> Cluster:
    """The cluster with the first of its hosts alone, which the inventory describes in more words."""
    others = [host.name for host in cluster.lab.hosts[hosts:]]
    kept = [line for line in cluster.lab.inventory.read_text().splitlines() if not any(name in line for name in others)]
    words = "".join(f"{key}: {json.dumps(value)}, " for key, value in settings.items())
    text = re.sub(r"^( +gpu-\S+: \{)", rf"\g<1>{words}", "\n".join(kept) + "\n", flags=re.MULTILINE)
    text = re.sub(r"^ +r\d+:\n +hosts:\n(?! +gpu)", "", text, flags=re.MULTILINE)
    cluster.inventory = cluster.folder / "hosts.yaml"
    cluster.inventory.write_text(text.replace("ssh_config: ssh_config", f"ssh_config: {cluster.lab.ssh_config}"))
    return cluster


def run(cluster: Cluster, *flags: str, command: str) -> Done:
    """A recipe that keeps outputs, to its end."""
    args = ["--launcher", "tasks", "-n", "2", *flags]
    return cluster.gpurun("submit", str(recipe(cluster, command)), "-i", str(cluster.inventory), "--follow", *args)


def recipe(cluster: Cluster, command: str) -> Path:
    path = cluster.folder / "recipe.yaml"
    path.write_text(json.dumps({"image": TINY, "outputs": "/checkpoints", "command": ["sh", "-c", command]}))
    return path


def leaves(cluster: Cluster, code: int = 0) -> str:
    """Run ranks that leave outputs and children; what gpurun said of it."""
    done = run(cluster, command=LEAVES.format(code=code))
    assert done.code == (1 if code else 0), done.err
    return done.out + done.err


@pytest.fixture
def host(cluster):
    return cluster.lab.hosts[0].name


@pytest.mark.parametrize(
    ("script", "socket", "uid"),
    [(REMAPPED, "/run/other.sock", 1500), (ROOTLESS, "/run/user/1500/docker.sock", 0)],
    ids=["userns-remap", "rootless"],
)
def test_an_engine_of_another_kind_runs_gangs_brings_their_outputs_home_and_is_fenced(
    cluster, host, script, socket, uid
):
    with other_engine(cluster.lab, host, script, socket) as docker_host:
        arranged(cluster, docker_host=docker_host)
        for code in (7, 0):
            said = leaves(cluster, code)
            assert re.findall(r"^\[[01]\] (\d+)$", said, re.MULTILINE) == [str(uid)] * 2
        jobs = {job["state"]: job for job in cluster.status()["jobs"]}
        assert (jobs["FAILED"]["exit_code"], jobs["FAILED"]["first_failure"]["host"]) == (7, host)
        outputs = cluster.home / "jobs" / jobs["SUCCEEDED"]["id"] / "outputs"
        assert {path.name: path.read_text() for path in outputs.iterdir()} == {
            "0": "from 0\n", "1": "from 1\n",
        }  # fmt: skip
        assert cluster.lab.run(host, ["docker", "--host", docker_host, "ps", "--all", "--quiet"]).stdout == b""
        assert cluster.lab.run(host, ["find", "/home/train/.gpurun/jobs", "-mindepth", "1"]).stdout == b""


def test_a_rootless_engine_has_its_own_network_so_a_gang_of_two_hosts_is_told_and_never_starts(cluster, host):
    with other_engine(cluster.lab, host, ROOTLESS, "/run/user/1500/docker.sock"):
        arranged(cluster, hosts=2)
        text = cluster.inventory.read_text()
        first = re.sub(rf"({host}: \{{)", r'\g<1>docker_host: "unix:///run/user/1500/docker.sock", ', text)
        cluster.inventory.write_text(first)
        job = cluster.gpurun(*cluster.submit_args("--launcher", "tasks", image=TINY), "--", "true").out.strip()
        said = f"{host}: docker-network: Docker at /run/user/1500/docker.sock has a network of its own"
        told = cluster.home / "jobs" / job / "events.jsonl"
        until(lambda: told.exists() and said in told.read_text(), every_s=LOOK_S)
        cluster.gpurun("cancel", job)
        assert "STARTING" not in told.read_text()


def test_a_gang_s_files_lie_in_the_folder_of_its_grant_whatever_the_inventory_says_later(cluster):
    for each in cluster.lab.hosts[:2]:
        cluster.lab.run(each.name, ["install", "-d", "-m", "1777", "/local"])
    arranged(cluster, hosts=2, folder="/local")
    look = "cp /proc/self/mountinfo /checkpoints/$GPURUN_RANK; echo begun; sleep 300"
    args = ["--launcher", "tasks", "-n", "2", "--gpus-per-host", "1"]
    job = cluster.gpurun("submit", str(recipe(cluster, look)), "-i", str(cluster.inventory), *args).out.strip()
    cluster.wait_for_log(job, "begun", times=2)
    cluster.inventory.write_text(cluster.inventory.read_text().replace("/local", "/elsewhere"))
    assert cluster.gpurun("cancel", job).code == 0
    cluster.wait_for(job, "CANCELLED")
    for rank in ("0", "1"):
        assert "/local/gpurun-1500/outputs" in (cluster.home / "jobs" / job / "outputs" / rank).read_text()
    for each in cluster.lab.hosts[:2]:
        left = cluster.lab.run(
            each.name, ["sh", "-c", "ls /local/gpurun-1500/jobs /local/gpurun-1500/outputs; ls ~train/.gpurun/jobs"]
        )
        assert "j-" not in str(left.stdout)
        cluster.lab.run(each.name, ["rm", "-rf", "/local"])


def test_a_python_that_the_inventory_names_runs_the_agent(cluster, host):
    cluster.lab.run(host, ["ln", "-sf", "/usr/bin/python3", "/opt/python-for-gpurun"])
    arranged(cluster, python="/opt/python-for-gpurun")
    assert leaves(cluster)
    cluster.lab.run(host, ["rm", "/opt/python-for-gpurun"])
    done = cluster.gpurun("doctor", "-i", str(cluster.inventory))
    assert "/opt/python-for-gpurun cannot be started" in done.out
