"""Ranks in real containers of an image with only a shell, seen from the host by an agent without root's rights."""

from __future__ import annotations

import os
import subprocess
import time
from types import SimpleNamespace

import pytest
from cluster import SHELL

from gpurun.inventory.read import load_inventory
from gpurun.lab import engine
from gpurun.launch.jobssh import HOLD
from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.rank import RANK_SCRIPT, rank_script
from gpurun.remote import Fleet
from gpurun.remote.route import target_of

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("rank_containers")]

HOST = "gpu-r1-01"
JOB = "j-0000c0de"
LIMIT_S = 60
WAIT = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.1; done"


@pytest.fixture
def host(lab):
    """A job's container, held by its main process, with an agent beside it."""
    environ = {**os.environ, "DOCKER_HOST": engine.ensure()}
    saved = subprocess.run(["docker", "save", SHELL], env=environ, check=True, stdout=subprocess.PIPE).stdout
    lab.run(HOST, ["docker", "load"], stdin=saved)
    inventory = load_inventory(lab.inventory)
    with Fleet.open([target_of(inventory.by_name[HOST], inventory)]) as fleet:
        agent = fleet.agents[HOST]
        account = agent.call("gang.prepare", job=JOB, attempt=1, interface="", first=True, outputs=False).value
        folder = f"{account['folder']}/jobs/{JOB}"
        run = [
            "docker",
            "run",
            "--detach",
            "--name",
            f"gpurun-{JOB}-1",
            "--init",
            "--network",
            "host",
            "--cap-drop",
            "ALL",
        ]
        run += ["--user", f"{account['uid']}:{account['gid']}", "--security-opt", "no-new-privileges"]
        run += ["--label", f"gpurun.job={JOB}", "--label", "gpurun.attempt=1"]
        run += ["--env", f"GPURUN_JOB={JOB}", "--env", "GPURUN_ATTEMPT=1", "--env", "GPURUN_RUN=/run/gpurun"]
        run += [
            "-v",
            f"{folder}/launch:/gpurun:ro",
            "-v",
            f"{folder}/run:/run/gpurun",
            "--entrypoint",
            "/gpurun/bin/hold",
        ]
        files = {"launch/bin/rank": [rank_script([], GLOO, grace_s=2), 0o755], "launch/bin/hold": [HOLD, 0o755]}
        made = agent.call("gang.create", job=JOB, attempt=1, files=files, run=[*run, SHELL], sshd=None)
        container = made.value["container"]
        agent.call("gang.start", container=container)

        def start(rank: int, *command: str) -> None:
            argv = ["docker", "exec", "--detach", "--env", f"HOROVOD_RANK={rank}", container, RANK_SCRIPT, *command]
            assert agent.call("proc.run", argv=argv).value["code"] == 0

        def follow(until) -> list:
            came = []
            with agent.stream("ranks.follow", job=JOB, attempt=1, have={}) as stream:
                for reply in stream:
                    came.append(reply)
                    if until(came):
                        return came
            raise AssertionError(came)

        try:
            yield SimpleNamespace(agent=agent, start=start, follow=follow, container=container, folder=folder)
        finally:
            agent.call("gang.fence", job=JOB, attempt=1, timeout_s=60.0)


def ends(came):
    return {r.value["rank"]: (r.value["code"], r.value.get("killed", False)) for r in came if r.value["kind"] == "end"}


def printed(came, text=b"up"):
    return {r.value["rank"] for r in came if r.value["kind"] == "output" and text in bytes(r.payload)}


@pytest.mark.timeout(300)
def test_ranks_are_followed_told_and_missed_when_killed(host):
    host.start(0, "sh", "-c", f"(setsid sleep 1000 &) ; {WAIT}")
    host.start(1, "sh", "-c", WAIT)
    host.start(2, "sh", "-c", "echo up; exec sleep 1000")
    host.start(3, "sh", "-c", "echo up; exit 37")
    came = host.follow(lambda came: len(printed(came)) == 4 and ends(came))
    assert ends(came) == {3: (37, False)}
    found = host.agent.call("ranks.list", job=JOB, attempt=1).value
    assert {one["rank"]: one["code"] for one in found} == {0: None, 1: None, 2: None, 3: 37}

    assert host.agent.call("gang.signal", job=JOB, name="TERM").value == 3
    came = host.follow(lambda came: len(ends(came)) == 4)
    assert ends(came) == {0: (7, False), 1: (7, False), 2: (143, False), 3: (37, False)}
    deadline = time.monotonic() + LIMIT_S
    while b"sleep 1000" in host.agent.call("proc.run", argv=["ps", "-eo", "args"]).value["stdout"].encode():
        assert time.monotonic() < deadline, "what a rank left behind lives on"
        time.sleep(0.1)
    host.start(4, "sh", "-c", "echo never")
    came = host.follow(lambda came: 4 in ends(came))
    assert ends(came)[4] == (143, False)
    assert 4 not in printed(came, b"never")


@pytest.mark.timeout(300)
def test_ranks_of_a_container_that_is_removed_have_ended(host):
    host.start(0, "sh", "-c", WAIT)
    host.start(1, "sh", "-c", "echo up; exit 5")
    host.follow(lambda came: len(printed(came)) == 2 and ends(came))
    argv = ["docker", "rm", "--force", host.container]
    with host.agent.stream("ranks.follow", job=JOB, attempt=1, have={}) as stream:
        assert host.agent.call("proc.run", argv=argv).value["code"] == 0
        came = []
        for reply in stream:
            came.append(reply)
            if len(ends(came)) == 2:
                break
    assert ends(came) == {0: (137, True), 1: (5, False)}
    with host.agent.stream("ranks.follow", job=JOB, attempt=1, have={}, once=True) as stream:
        assert ends([reply for reply in stream if reply.value]) == {0: (137, True), 1: (5, False)}


ABANDON = """
import json, socket, sys, time
for attempt in (6,):
    client = socket.socket(socket.AF_UNIX)
    client.connect("/var/run/docker.sock")
    labels = {"gpurun.job": sys.argv[1], "gpurun.attempt": str(attempt)}
    body = json.dumps({"Image": sys.argv[2], "Cmd": ["true"], "Labels": labels})
    name = "gpurun-%s-%d" % (sys.argv[1], attempt)
    head = "POST /containers/create?name=%s HTTP/1.1\\r\\nHost: d\\r\\nContent-Type: application/json\\r\\n"
    client.sendall((head % name + "Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body)).encode())
    client.close()
"""
"""A client that has Docker create containers, and dies before Docker has answered."""


@pytest.mark.timeout(300)
def test_a_fence_removes_what_docker_creates_for_a_client_that_has_died(host):
    for _ in range(5):
        host.agent.call("gang.prepare", job=JOB, attempt=6, interface="", first=True, outputs=False)
        note = f'{{"attempt": 6, "name": "gpurun-{JOB}-6"}}'.encode()
        host.agent.call("files.write", path=f"{host.folder}/creating.json", payload=note)
        made = host.agent.call("proc.run", argv=["python3", "-c", ABANDON, JOB, SHELL]).value
        assert made["code"] == 0
        rest = host.agent.call("gang.fence", job=JOB, attempt=6, timeout_s=60.0).value
        assert not any(rest.values())
        time.sleep(1.0)
        assert host.agent.call("gang.inspect", job=JOB).value == []
