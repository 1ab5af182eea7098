"""Hosts with another Python, another Docker, or shared home folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import TINY, TRAIN, Cluster, Done
from other_engines import REMAPPED, ROOTLESS, other_engine

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("real-hosts")]

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


def run(cluster: Cluster, *flags: str, image: str, command: str) -> Done:
    """A recipe that keeps outputs, to its end."""
    recipe = cluster.folder / "recipe.yaml"
    recipe.write_text(json.dumps({"image": image, "outputs": "/checkpoints", "command": ["sh", "-c", command]}))
    return cluster.gpurun("submit", str(recipe), "-i", str(cluster.inventory), "-n", "2", "--follow", *flags)


def leaves(cluster: Cluster, code: int = 0) -> str:
    """Run ranks that leave outputs and children; what gpurun said of it."""
    done = run(cluster, "--launcher", "tasks", image=TINY, command=LEAVES.format(code=code))
    assert done.code == (1 if code else 0), done.err
    return done.out + done.err


@pytest.fixture
def host(cluster):
    return cluster.lab.hosts[0].name


def only_job(cluster: Cluster) -> tuple[dict, Path]:
    (record,) = cluster.status()["jobs"]
    return record, cluster.home / "jobs" / record["id"]


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize(
    ("script", "socket", "uid"),
    [(REMAPPED, "/run/other.sock", 1500), (ROOTLESS, "/run/user/1500/docker.sock", 0)],
    ids=["userns-remap", "rootless"],
)
def test_an_engine_of_another_kind_runs_a_gang_brings_its_outputs_home_and_is_fenced(
    cluster, host, script, socket, uid, code
):
    with other_engine(cluster.lab, host, script, socket) as docker_host:
        arranged(cluster, docker_host=docker_host)
        said = leaves(cluster, code)
        assert re.findall(r"rank [01] \| (\d+)$", said, re.MULTILINE) == [str(uid)] * 2
        record, folder = only_job(cluster)
        if code:
            assert (record["exit_code"], record["first_failure"]["host"]) == (code, host)
        else:
            assert {path.name: path.read_text() for path in (folder / "outputs").iterdir()} == {
                "0": "from 0\n", "1": "from 1\n",
            }  # fmt: skip
        assert cluster.lab.run(host, ["docker", "--host", docker_host, "ps", "--all", "--quiet"]).stdout == b""
        assert cluster.lab.run(host, ["find", "/home/train/.gpurun/jobs", "-mindepth", "1"]).stdout == b""


def test_a_rootless_engine_has_its_own_network_so_a_gang_of_two_hosts_is_told_and_nobody_waits(cluster, host):
    with other_engine(cluster.lab, host, ROOTLESS, "/run/user/1500/docker.sock"):
        arranged(cluster, hosts=2)
        text = cluster.inventory.read_text()
        first = re.sub(rf"({host}: \{{)", r'\g<1>docker_host: "unix:///run/user/1500/docker.sock", ', text)
        cluster.inventory.write_text(first)
        done = cluster.submit("--launcher", "tasks", image=TINY, command=["true"])
        assert done.code != 0
        assert f"{host}: docker-network: Docker at /run/user/1500/docker.sock has a network of its own" in done.err


def test_a_gang_s_files_lie_in_the_folder_that_the_inventory_names_and_not_in_the_home(cluster, host):
    for each in cluster.lab.hosts[:2]:
        cluster.lab.run(each.name, ["install", "-d", "-m", "1777", "/local"])
    arranged(cluster, hosts=2, folder="/local")
    look = "find /gpurun /run/gpurun /workspace >/dev/null 2>&1; cp /proc/self/mountinfo /checkpoints/$HOROVOD_RANK"
    done = run(cluster, "--gpus-per-host", "1", image=TRAIN, command=look)
    assert done.code == 0, done.err
    _, folder = only_job(cluster)
    for rank in ("0", "1"):
        assert "/local/gpurun-1500/outputs" in (folder / "outputs" / rank).read_text()
    for each in cluster.lab.hosts[:2]:
        left = cluster.lab.run(
            each.name, ["sh", "-c", "ls /local/gpurun-1500/jobs /local/gpurun-1500/outputs; ls ~train/.gpurun/jobs"]
        )
        assert "j-" not in str(left.stdout)
        cluster.lab.run(each.name, ["rm", "-rf", "/local"])


def test_the_folder_of_a_running_gang_is_the_one_of_its_grant_whatever_the_inventory_says_later(cluster, host):
    cluster.lab.run(host, ["install", "-d", "-m", "1777", "/local"])
    arranged(cluster, folder="/local")
    args = cluster.submit_args("--launcher", "tasks", gpus=1, image=TINY)
    job = cluster.gpurun(*args, "--", "sh", "-c", "sleep 300").out.strip()
    cluster.wait_for(job, "RUNNING")
    cluster.inventory.write_text(cluster.inventory.read_text().replace("/local", "/elsewhere"))
    assert cluster.gpurun("cancel", job).code == 0
    assert cluster.wait_for(job, "CANCELLED")
    assert b"j-" not in cluster.lab.run(host, ["ls", "/local/gpurun-1500/jobs"]).stdout
    cluster.lab.run(host, ["rm", "-rf", "/local"])


def test_a_python_that_the_inventory_names_runs_the_agent(cluster, host):
    cluster.lab.run(host, ["ln", "-sf", "/usr/bin/python3", "/opt/python-for-gpurun"])
    arranged(cluster, python="/opt/python-for-gpurun")
    assert leaves(cluster)
    cluster.lab.run(host, ["rm", "/opt/python-for-gpurun"])
    done = cluster.gpurun("doctor", "-i", str(cluster.inventory))
    assert "/opt/python-for-gpurun cannot be started" in done.out
