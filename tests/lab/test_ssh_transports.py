"""The machine's own ``ssh`` carries whole jobs, also to hosts that ask a person for a second factor."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cluster import TINY, Cluster
from terminal import typed
from test_real_hosts import arranged
from waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("ssh_transports")]

SECOND_FACTOR = """
set -e
cp /etc/ssh/sshd_config /root/sshd_config.before
cp /etc/pam.d/sshd /root/pam.before
printf '#!/bin/sh\\nIFS= read -r typed\\necho asked >> /root/asked\\n[ "${typed%%%%\\0}" = "424 242" ]\\n' > /root/check
chmod 700 /root/check
sed -i 's/^AuthenticationMethods.*/AuthenticationMethods publickey,keyboard-interactive/; \
  s/^KbdInteractiveAuthentication.*/KbdInteractiveAuthentication yes/' /etc/ssh/sshd_config
{ echo 'auth required pam_exec.so quiet expose_authtok /root/check'; echo 'auth required pam_permit.so'
  grep -v ^auth /root/pam.before; } > /etc/pam.d/sshd
kill -HUP $(pgrep -o -x sshd)
"""
ONE_FACTOR = """
cp /root/sshd_config.before /etc/ssh/sshd_config
cp /root/pam.before /etc/pam.d/sshd
rm -f /root/check /root/asked /root/*.before
kill -HUP $(pgrep -o -x sshd)
"""
UNTIL_GO = "echo begun; until [ -e /tmp/go ]; do sleep 0.2; done; echo ended"
GO = "docker ps -q --filter label=gpurun.job | xargs -I{} docker exec {} touch /tmp/go"


@pytest.fixture
def own_folder(cluster):
    """The user's own configuration; its path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        cluster.environ["XDG_CONFIG_HOME"] = folder
        yield Path(folder)


@pytest.fixture
def asking(cluster, own_folder):
    """A cluster of one host, which wants a key and then a number that a person types."""
    host = cluster.lab.hosts[0].name
    inside = ["sh", "-c", SECOND_FACTOR]
    assert cluster.lab.run(host, inside).code == 0
    yield arranged(cluster)
    cluster.gpurun("inventory", "connect", "--close", "@all", "-i", str(cluster.inventory))
    assert cluster.lab.run(host, ["sh", "-c", ONE_FACTOR]).code == 0
    until(lambda: cluster.gpurun("inventory", "probe", "-i", str(cluster.inventory)).code == 0)


def ssh_of(pid: int) -> list[int]:
    """The processes of the machine's own ``ssh`` below a process."""
    listed = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if line.split()[1:] == ["ssh"]]


def supervisor_of(cluster: Cluster, job: str) -> int:
    """The process whose children carry a job."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if job.encode() in words and any(b"supervis" in word for word in words):
            return int(folder.name)
    raise AssertionError(f"nobody carries {job}")


def test_a_whole_job_runs_over_the_system_s_ssh_and_its_supervisor_comes_back_when_ssh_is_killed(cluster, own_folder):
    arranged(cluster, hosts=2, ssh="system")
    args = cluster.submit_args("--launcher", "tasks", gpus=2, image=TINY)
    job = cluster.gpurun(*args, "--", "sh", "-c", UNTIL_GO).out.strip()
    cluster.wait_for_log(job, "begun")
    inside = cluster.gpurun("exec", job, "--rank", "1", "--", "sh", "-c", "echo it is $GPURUN_JOB 'a  b'")
    assert (inside.code, inside.out.strip()) == (0, f"it is {job} a  b"), inside.err
    carrier = supervisor_of(cluster, job)
    first = until(lambda: found if len(found := ssh_of(carrier)) == 2 else [])
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    again = until(lambda: found if len(found := ssh_of(carrier)) == 2 and not set(found) & set(first) else [])
    for host in cluster.lab.hosts[:2]:
        cluster.lab.run(host.name, ["sh", "-c", GO])
    assert cluster.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    assert len(re.findall(r"^.*ended$", cluster.log(job), re.MULTILINE)) == 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in again))


def test_a_host_that_asks_for_a_second_factor_runs_jobs_once_a_person_has_typed_it(asking):
    host, inventory = asking.lab.hosts[0].name, str(asking.inventory)
    refused = asking.gpurun("doctor", "-i", inventory)
    assert f"gpurun inventory connect {host}" in refused.out + refused.err, refused.out + refused.err
    command = [sys.executable, "-m", "gpurun", "inventory", "connect", host, "-i", inventory]
    code, printed = typed(command, {"assword": "wrong"}, asking.environ)
    assert code == 4 and "refused the login" in printed, printed
    code, printed = typed(command, {"assword": "424 242"}, asking.environ)
    assert code == 0 and "connected" in printed, printed
    times = asked(asking)
    done = asking.submit("--launcher", "tasks", gpus=1, image=TINY, command=["echo", "it runs"])
    assert done.code == 0, done.err
    assert "it runs" in done.out
    assert asked(asking) == times, "nobody was asked again"


def asked(cluster: Cluster) -> int:
    """How often the host has asked for the second factor."""
    said = cluster.lab.run(cluster.lab.hosts[0].name, ["cat", "/root/asked"]).stdout
    return said.count(b"asked")


def test_a_job_whose_shared_connection_ends_says_how_to_open_it_anew_and_goes_on_then(asking):
    host, inventory = asking.lab.hosts[0].name, str(asking.inventory)
    command = [sys.executable, "-m", "gpurun", "inventory", "connect", host, "-i", inventory]
    assert typed(command, {"assword": "424 242"}, asking.environ)[0] == 0
    args = asking.submit_args("--launcher", "tasks", gpus=1, image=TINY)
    job = asking.gpurun(*args, "--", "sh", "-c", UNTIL_GO).out.strip()
    asking.wait_for_log(job, "begun")
    assert asking.gpurun("inventory", "connect", "--close", host, "-i", inventory).code == 0
    carrier = supervisor_of(asking, job)
    until(lambda: not ssh_of(carrier))
    refused = asking.gpurun("doctor", "-i", inventory)
    assert f"gpurun inventory connect {host}" in refused.out + refused.err, refused.out + refused.err
    assert typed(command, {"assword": "424 242"}, asking.environ)[0] == 0
    until(lambda: ssh_of(carrier))
    asking.lab.run(host, ["sh", "-c", GO])
    assert asking.wait_for(job, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    assert "ended" in asking.log(job)


@pytest.mark.story
def test_a_changed_host_key_is_refused_on_both_transports(cluster, own_folder):
    known = (cluster.lab.folder / "known_hosts").read_text().splitlines()
    first, second = known[0].split(), known[1].split()
    (cluster.folder / "known_hosts").write_text(" ".join([first[0], *second[1:]]) + "\n")
    config = cluster.lab.ssh_config.read_text()
    config = config.replace(str(cluster.lab.folder / "known_hosts"), str(cluster.folder / "known_hosts"))
    (cluster.folder / "ssh_config").write_text(config.replace("StrictHostKeyChecking yes", "StrictHostKeyChecking no"))
    for ssh in ("paramiko", "system"):
        arranged(cluster, ssh=ssh)
        text = cluster.inventory.read_text().replace(str(cluster.lab.ssh_config), str(cluster.folder / "ssh_config"))
        cluster.inventory.write_text(text)
        done = cluster.gpurun("doctor", "-i", str(cluster.inventory))
        assert "the host's key has changed: the host shows ssh-ed25519 SHA256:" in done.out, done.out + done.err
        assert f"{cluster.folder / 'known_hosts'}:1 says" in done.out
