"""Sessions to real hosts over a failing network: which failures gpurun detects, how soon, and as which error."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace

import pytest
from waiting import LIMIT_S, until

from gpurun.errors import AuthenticationFailed, HostKeyMismatch, HostNotReady, HostUnreachable
from gpurun.inventory.read import load_inventory
from gpurun.remote import Fleet, Target
from gpurun.remote.route import target_of

pytestmark = [pytest.mark.lab]

HOSTS = ["gpu-r1-01", "gpu-r1-02", "gpu-r2-01", "gpu-r2-02"]


@pytest.fixture
def targets(lab):
    inventory = load_inventory(lab.inventory)
    return [target_of(inventory.by_name[host], inventory) for host in HOSTS]


@pytest.fixture
def copied(lab, tmp_path):
    """The lab's ssh_config and known_hosts, to be changed: a function (file, old, new) → the new configuration."""

    def change(file, old, new):
        config = lab.ssh_config.read_text()
        if file == "ssh_config":
            assert old in config
            config = config.replace(old, new)
        else:
            known = (lab.folder / "known_hosts").read_text()
            assert old in known
            (tmp_path / "known_hosts").write_text(known.replace(old, new))
            config = config.replace(str(lab.folder / "known_hosts"), str(tmp_path / "known_hosts"))
        (tmp_path / "ssh_config").write_text(config)
        return str(tmp_path / "ssh_config")

    return change


def test_four_hosts_and_nothing_stays_on_them(lab, targets):
    with Fleet.open(targets) as fleet:
        assert not fleet.failures
        said = fleet.map(lambda agent: agent.call("proc.run", argv=["hostname"]).value["stdout"].strip()).raise_first()
        assert said == {host: host for host in HOSTS}
        assert fleet.agents[HOSTS[0]].hello["user"] == "train"
    for host in HOSTS:
        until(lambda host=host: b"-ISc" not in lab.run(host, ["ps", "ax"]).stdout)
        found = lab.run(host, ["find", "/tmp", "/home/train", "-name", "*gpurun-agent*"]).stdout
        assert found == b""


def test_hosts_that_go_are_noticed_by_every_waiting_call_and_cost_the_others_nothing(lab, targets):
    """One host loses its cable, another one its power."""
    gone, there = HOSTS[1:3], [HOSTS[0], HOSTS[3]]
    errors = []
    with Fleet.open(targets) as fleet:

        def wait(host):
            try:
                fleet.agents[host].call("proc.run", argv=["sleep", "600"], timeout_s=600)
            except HostUnreachable as error:
                errors.append(error.host)

        threads = [threading.Thread(target=wait, args=(host,)) for host in gone * 3]
        for thread in threads:
            thread.start()
        for host in gone:
            until(lambda host=host: b"sleep 600" in lab.run(host, ["ps", "ax"]).stdout)
        lab.cut(gone[0])
        lab.crash(gone[1])
        for thread in threads:
            thread.join(LIMIT_S)
        assert sorted(errors) == sorted(gone * 3)
        assert not any(fleet.agents[host].alive for host in gone)
        assert not fleet.map(lambda agent: agent.call("files.stat", path="/").value["kind"], there).failed
    with Fleet.open(targets, timeout_s=4) as fleet:
        assert list(fleet.agents) == there
        assert {host: type(error) for host, error in fleet.failures.items()} == dict.fromkeys(gone, HostUnreachable)


def test_an_agent_ends_when_its_host_is_cut_off(lab, targets, monkeypatch):
    monkeypatch.setattr("gpurun.remote.opening.AGENT_SILENCE_LIMIT_S", 3.0)
    monkeypatch.setattr("gpurun.remote.fleet.PING_AFTER_S", 1.0)
    with Fleet.open(targets[:1]) as fleet:
        pid = fleet.agents[HOSTS[0]].hello["pid"]
        lab.cut(HOSTS[0])
        until(lambda: lab.run(HOSTS[0], ["kill", "-0", str(pid)]).code != 0)
    lab.heal(HOSTS[0])


def test_a_changed_host_key(lab, targets, copied):
    known = (lab.folder / "known_hosts").read_text().splitlines()
    line = next(line for line in known if HOSTS[0] in line or lab.hosts[0].address in line)
    other = next(entry for entry in known if entry.split()[2] != line.split()[2]).split()[2]
    config = copied("known_hosts", line.split()[2], other)
    with Fleet.open([replace(targets[0], ssh_config=config)]) as fleet:
        error = fleet.failures[HOSTS[0]]
        assert isinstance(error, HostKeyMismatch)
        assert error.message.count("SHA256:") == 2 and "known_hosts:" in error.where


def test_a_refused_key(lab, targets, copied, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    config = copied("ssh_config", str(lab.folder / "id_ed25519"), str(tmp_path / "other"))
    with Fleet.open([replace(targets[0], ssh_config=config)]) as fleet:
        assert isinstance(fleet.failures[HOSTS[0]], AuthenticationFailed)


def test_a_host_without_python3(lab, targets):
    # The login shell finds this python3 first, and it fails as if missing.
    script = "#!/bin/sh\necho python3: not found >&2\nexit 127\n"
    lab.run(HOSTS[3], ["mkdir", "-p", "/usr/local/bin"])
    lab.run(HOSTS[3], ["mount", "-t", "tmpfs", "none", "/usr/local/bin"])
    lab.run(HOSTS[3], ["tee", "/usr/local/bin/python3"], stdin=script.encode())
    lab.run(HOSTS[3], ["chmod", "755", "/usr/local/bin", "/usr/local/bin/python3"])
    try:
        with Fleet.open(targets[3:]) as fleet:
            error = fleet.failures[HOSTS[3]]
            assert isinstance(error, HostNotReady) and "python3" in error.message
    finally:
        lab.run(HOSTS[3], ["umount", "/usr/local/bin"])


def test_a_host_without_docker_says_so(lab, targets):
    with Fleet.open([replace(targets[0], docker_host="unix:///nowhere.sock")]) as fleet:
        with pytest.raises(Exception, match="Docker does not answer") as caught:
            fleet.agents[HOSTS[0]].call("docker.request", method="GET", path="/info")
        assert caught.value.kind == "no-docker"
    with Fleet.open(targets[:1]) as fleet:
        agent = fleet.agents[HOSTS[0]]
        assert agent.call("docker.request", method="GET", path="/info").value["json"]["Driver"] == "overlay2"
        assert agent.call("docker.request", method="GET", path="/images/none:1/json").value["status"] == 404


def test_the_way_over_another_host(lab, targets, tmp_path):
    config = tmp_path / "ssh_config"
    config.write_text(f"Host {HOSTS[3]}\n  ProxyJump {HOSTS[0]},{HOSTS[1]}\n" + lab.ssh_config.read_text())
    with Fleet.open([Target(HOSTS[3], ssh_config=str(config))]) as fleet:
        assert not fleet.failures
        seen_from = fleet.agents[HOSTS[3]].call("proc.run", argv=["printenv", "SSH_CONNECTION"]).value["stdout"]
        assert seen_from.split()[0] == str(lab.hosts[1].address)
