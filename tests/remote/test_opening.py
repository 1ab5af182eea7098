"""Opening agents: what a person meets when a host is not as it should be."""

import base64
import errno
import getpass
import itertools
import os
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

from gpurun.errors import (
    AuthenticationFailed,
    HeadShort,
    HostFailure,
    HostKeyMismatch,
    HostNotReady,
    HostUnreachable,
)
from gpurun.remote import Fleet, Target, known_hosts, opening, route, session, system_ssh
from gpurun.remote import session as dial
from gpurun.remote import session as keys
from gpurun.remote.known_hosts import fingerprint
from gpurun.remote.route import Contact
from gpurun.remote.session import Attempt


@pytest.fixture(params=["paramiko", "system"])
def net(net, request):
    """Every test holds for both transports."""
    net.ssh = request.param
    return net


def failure(target, **kw):
    with Fleet.open([target], **kw) as fleet:
        assert not fleet.agents
        (error,) = fleet.failures.values()
        assert error.host == target.name
        return error


def test_an_agent_answers_and_leaves_nothing(net):
    server = net.sshd()
    with Fleet.open([net.host("gpu1", server)]) as fleet:
        agent = fleet.agents["gpu1"]
        pid = agent.hello["pid"]
        assert agent.hello["user"] == getpass.getuser()
        assert agent.alive
        assert Path(f"/proc/{pid}").exists()
        assert b"-ISc" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert not agent.alive
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_many_hosts_at_once_and_one_that_is_dead(net, monkeypatch):
    """The dead one is the first to be tried, and is given less time than the others may need here."""
    server, patience_s = net.sshd(), itertools.chain([1.0], itertools.repeat(LIMIT_S))
    monkeypatch.setattr(opening, "Attempt", lambda _: Attempt(time.monotonic() + next(patience_s)))
    dead = socket.socket()
    dead.bind(("127.0.0.1", 0))
    dead.listen(1)  # accepts, never answers: as a host whose sshd hangs
    try:
        targets = [net.host(f"gpu{i}", server) for i in range(12)]
        silent = Target(
            "silent", address="127.0.0.1", port=dead.getsockname()[1], ssh_config=targets[0].ssh_config, ssh=net.ssh
        )
        with Fleet.open([silent, *targets]) as fleet:
            assert list(fleet.agents) == [target.name for target in targets]
            error = fleet.failures["silent"]
            assert isinstance(error, HostUnreachable)
            assert f"{LIMIT_S:g} s" in str(error) or "timed out" in str(error) or "handshake" in str(error)
    finally:
        dead.close()


class Told:
    """Who is told of first contacts."""

    def __init__(self, connect_s=LIMIT_S):
        self.asked, self.heard = [], []
        self.contact = Contact(connect_s, self.asked.append, self.heard.append)


@pytest.fixture
def mute(net):
    """A host that does not even accept a connection: its kernel drops the questions, because others wait."""
    full, first = socket.socket(), socket.socket()
    with full, first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        yield Target(
            "mute", address="127.0.0.1", port=full.getsockname()[1], ssh_config=str(net.ssh_config), ssh=net.ssh
        )


def test_a_host_that_accepts_no_connection_is_given_up_before_one_that_is_slow(net, mute):
    told = Told(connect_s=0.3)
    slow = socket.socket()
    slow.bind(("127.0.0.1", 0))
    slow.listen(1)
    with slow:
        other = Target("slow", address="127.0.0.1", port=slow.getsockname()[1], ssh_config=mute.ssh_config, ssh=net.ssh)
        with Fleet.open([mute, other], timeout_s=3.0, contact=told.contact) as fleet:
            assert "timed out" in str(fleet.failures["mute"])
            assert "no connection" not in str(fleet.failures["slow"])
    assert sorted(told.asked) == ["mute", "slow"]
    assert told.heard == ["slow"], "it answers, though no agent runs there yet"


def test_a_host_that_refuses_answers_and_so_does_one_whose_agent_runs(net):
    told = Told()
    down, up = net.sshd(start=False), net.sshd()
    with Fleet.open([net.host("gpu1", down), net.host("gpu2", up)], contact=told.contact) as fleet:
        assert list(fleet.agents) == ["gpu2"]
    assert sorted(told.asked) == sorted(told.heard) == ["gpu1", "gpu2"]


def test_nobody_is_told_of_a_host_behind_another_one(net):
    """The host on the way answers, which says nothing of the other one."""
    told = Told()
    first, last = net.sshd(), net.sshd()
    net.host("bastion", first)
    with Fleet.open([net.host("gpu1", last, "ProxyJump bastion")], contact=told.contact) as fleet:
        assert list(fleet.agents) == ["gpu1"]
    assert told.asked == told.heard == []


def test_a_name_that_cannot_be_resolved_is_not_asked(net):
    told = Told()
    failure(Target("gpu.invalid", ssh_config=str(net.ssh_config), ssh=net.ssh), contact=told.contact)
    assert told.asked == told.heard == []


def test_fewer_slots_than_hosts(net):
    server = net.sshd()
    with Fleet.open([net.host(f"gpu{i}", server) for i in range(5)], limit=2) as fleet:
        assert len(fleet.agents) == 5


def test_connection_refused_says_so_at_once(net):
    server = net.sshd(start=False)
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostUnreachable)
    assert "refused" in str(error)


def test_a_name_that_does_not_resolve(net):
    error = failure(Target("gpu.invalid", ssh_config=str(net.ssh_config), ssh=net.ssh))
    assert isinstance(error, HostUnreachable)
    assert "gpu.invalid" in str(error)


def test_something_else_listens(net):
    liar = socket.socket()
    liar.bind(("127.0.0.1", 0))
    liar.listen()

    def speak():
        connection, _ = liar.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
        connection.close()

    threading.Thread(target=speak, daemon=True).start()
    error = failure(Target("gpu1", address="127.0.0.1", port=liar.getsockname()[1], ssh_config=str(net.ssh_config)))
    assert isinstance(error, HostUnreachable)
    liar.close()


@pytest.mark.parametrize("said", ["Exceeded MaxStartups", "Not allowed at this time", "x\x1b[2Jy"])
def test_what_a_host_says_before_it_hangs_up_is_the_reason(net, said):
    """OpenSSH's sshd says this if too many log in at once, or if logins from here have failed too often."""
    with socket.create_server(("127.0.0.1", 0)) as busy:

        def speak():
            connection, _ = busy.accept()
            with connection:
                connection.sendall(f"{said}\r\n".encode())

        threading.Thread(target=speak, daemon=True).start()
        config = str(net.ssh_config)
        error = failure(Target("gpu1", "127.0.0.1", busy.getsockname()[1], ssh_config=config, ssh="paramiko"))
    assert isinstance(error, HostUnreachable) and "\x1b" not in error.message
    assert said.replace("\x1b", "?") in error.message


def _packet(content):
    padding = 16 - (len(content) + 5) % 8
    return struct.pack(">IB", len(content) + padding + 1, padding) + content + bytes(padding)


def _lists(names):
    return bytes([20]) + bytes(16) + b"".join(struct.pack(">I", len(name)) + name for name in names) + bytes(5)


ALGORITHMS = (
    b"curve25519-sha256@libssh.org", b"ssh-ed25519", b"aes128-ctr", b"aes128-ctr", b"hmac-sha2-256", b"hmac-sha2-256",
    b"none", b"none", b"", b"",
)  # fmt: skip
BROKEN_SSH = {
    "names that are no text": _packet(_lists([b"\xff"] * 10)),
    "an empty packet": _packet(b""),
    "a farewell that is no text": _packet(bytes([1]) + struct.pack(">II", 11, 1) + b"\xff"),
    "a key that is none": _packet(_lists(ALGORITHMS)) + _packet(bytes([31]) + struct.pack(">I", 1) + b"x"),
    "an algorithm nobody has": _packet(_lists([b"x"] * 10)),
}


@pytest.mark.parametrize("said", BROKEN_SSH.values(), ids=BROKEN_SSH)
def test_a_host_that_speaks_ssh_wrongly_is_that_hosts_failure_alone(net, said):
    liar, sound = socket.create_server(("127.0.0.1", 0)), net.host("gpu2", net.sshd())

    def speak():
        connection, _ = liar.accept()
        with connection:
            connection.sendall(b"SSH-2.0-broken\r\n" + said)
            while connection.recv(1 << 12):
                pass

    port = liar.getsockname()[1]
    with liar:
        threading.Thread(target=speak, daemon=True).start()
        broken = Target("gpu1", address="127.0.0.1", port=port, ssh_config=str(net.ssh_config), ssh=net.ssh)
        with Fleet.open([broken, sound]) as fleet:
            assert list(fleet.agents) == ["gpu2"]
            assert isinstance(fleet.failures["gpu1"], HostUnreachable)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_head_that_is_short_says_nothing_about_a_host(net, monkeypatch, number):
    target = net.host("gpu1", net.sshd())

    def short(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(dial, "_begun", short)
    monkeypatch.setattr(system_ssh, "SystemSsh", short)
    error = failure(target)
    assert isinstance(error, HeadShort) and os.strerror(number).lower() in error.message


@pytest.mark.parametrize("place", [(known_hosts, "_load"), (keys, "_load_key"), (route.subprocess, "Popen")])
def test_a_head_that_can_open_no_file_says_nothing_about_a_host(net, monkeypatch, place):
    """A known host seemed unknown, or to refuse the login; without ``ssh -G`` all hosts were out."""
    if place[0] is keys:  # else ``ssh`` reads them
        net.ssh = "paramiko"
    target = net.host("gpu1", net.sshd())

    def short(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(*place, short)
    error = failure(target)
    assert isinstance(error, HeadShort) and "too many open files" in error.message


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError("can't start new thread"), "can't start new thread"), (MemoryError(), "no memory is left")],
)
def test_a_head_without_threads_or_memory_says_nothing_about_a_host(error, why):
    found = session.as_host_failure(error, "gpu1")
    assert isinstance(found, HeadShort) and found.host == "gpu1"
    assert found.message == f"this machine cannot connect to the host now: {why}"


def test_an_unknown_host_key_is_refused(net):
    server = net.sshd()
    net.known_hosts.write_text("")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostKeyMismatch)
    assert "SHA256:" in error.message and str(net.known_hosts) in error.message
    assert error.hint and "gpurun inventory trust gpu1" in error.hint


def test_a_changed_host_key_names_both_and_the_line(net, tmp_path):
    server = net.sshd()
    other = net.new_key("other")
    net.known_hosts.write_text(f"# first line\n[127.0.0.1]:{server.port} {net.public(other)}\n")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostKeyMismatch)
    shown = blob_fingerprint(server.host_keys[0])
    assert shown in error.message
    assert blob_fingerprint(other) in error.message
    assert error.where == f"{net.known_hosts}:2"
    assert error.hint and "inventory trust" in error.hint


def blob_fingerprint(key):
    return fingerprint(base64.b64decode(Path(f"{key}.pub").read_text().split()[1]))


def test_nothing_is_said_to_a_host_with_the_wrong_key(net, tmp_path, monkeypatch):
    server = net.sshd()
    net.known_hosts.write_text(f"[127.0.0.1]:{server.port} {net.public(net.new_key('other'))}\n")
    monkeypatch.setattr(session, "_authenticate", lambda *a: pytest.fail("a key was offered"))
    assert isinstance(failure(net.host("gpu1", server)), HostKeyMismatch)


def test_a_revoked_key(net):
    server = net.sshd()
    with net.known_hosts.open("a") as known:
        known.write(f"@revoked * {net.public(server.host_keys[0])}\n")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostKeyMismatch) and "revoked" in error.message


def test_the_key_type_that_is_known_is_negotiated(net):
    server = net.sshd(keys=("ed25519", "rsa", "ecdsa"))
    for kind in (1, 2):
        net.known_hosts.write_text(f"[127.0.0.1]:{server.port} {net.public(server.host_keys[kind])}\n")
        with Fleet.open([net.host(f"gpu{kind}", server)]) as fleet:
            assert not fleet.failures


def test_hashed_known_hosts(net):
    server = net.sshd()
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(net.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in net.known_hosts.read_text()
    with Fleet.open([net.host("gpu1", server)]) as fleet:
        assert not fleet.failures


def test_a_refused_key(net):
    server = net.sshd()
    (server.folder / "authorized_keys").write_text("")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, AuthenticationFailed)
    assert getpass.getuser() in error.message and str(net.key) in error.message


def test_no_key_at_all(net):
    server = net.sshd()
    net.key.unlink()
    error = failure(net.host("gpu1", server))
    assert isinstance(error, AuthenticationFailed)
    assert "no key" in error.message or "No such file" in error.message


def test_a_key_with_a_passphrase(net):
    server = net.sshd()
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(net.key)], check=True, capture_output=True
    )
    error = failure(net.host("gpu1", server))
    assert isinstance(error, AuthenticationFailed)
    assert "passphrase" in error.message and "secret" not in str(error)


def test_a_host_that_wants_no_keys(net):
    server = net.sshd("PubkeyAuthentication no", "PasswordAuthentication yes")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, AuthenticationFailed)
    assert "password" in error.message


def test_noise_of_start_files_is_skipped(net):
    noisy = (
        r"""sh -c 'printf "Welcome!\n\000gpurun-agent:0000\n"; echo warning >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"'"""
    )
    server = net.sshd(f"ForceCommand {noisy}")
    with Fleet.open([net.host("gpu1", server)]) as fleet:
        assert not fleet.failures
        assert fleet.agents["gpu1"].call("proc.run", argv=["echo", "hi"]).value["stdout"] == "hi\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("sh -c 'exit 7'", "code 7"),
        ("sh -c 'echo go away >&2; exit 1'", "go away"),
        ("sh -c 'cat /dev/zero'", "without end"),
        ("sh -c 'echo nologin'", "nologin"),
    ],
)
def test_a_login_shell_that_runs_no_agent(net, command, text):
    error = failure(net.host("gpu1", net.sshd(f"ForceCommand {command}")))
    assert isinstance(error, HostNotReady)
    assert text in str(error)


def test_a_shell_that_hangs_costs_its_timeout(net):
    server = net.sshd("ForceCommand sh -c 'echo loading; sleep 60'")
    error = failure(net.host("gpu1", server), timeout_s=2)
    assert isinstance(error, HostUnreachable)


def test_no_python3(net, python_bin):
    server = net.sshd("ForceCommand sh -c 'PATH=/nowhere; eval \"$SSH_ORIGINAL_COMMAND\"'")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostNotReady)
    assert "python3" in error.message


def test_a_python_that_is_too_old(net, python_bin):
    folder = python_bin('#!/bin/sh\necho "gpurun needs Python 3.8 or newer, this is 3.6.8" >&2\nexit 1\n')
    server = net.sshd(f"ForceCommand sh -c 'PATH={folder}:$PATH; eval \"$SSH_ORIGINAL_COMMAND\"'")
    error = failure(net.host("gpu1", server))
    assert isinstance(error, HostNotReady)
    assert "3.6.8" in error.message


def test_the_way_over_jump_hosts(net):
    first, second, last = net.sshd(), net.sshd(), net.sshd()
    net.host("first", first)
    net.host("second", second)
    targets = [net.host(f"gpu{i}", last, "ProxyJump first,second") for i in range(4)]
    with Fleet.open(targets) as fleet:
        assert not fleet.failures
        assert fleet.map(lambda agent: agent.call("files.stat", path="/").value["kind"]).raise_first() == {
            target.name: "dir" for target in targets
        }


def test_a_jump_host_that_is_down_is_named(net):
    down, last = net.sshd(start=False), net.sshd()
    net.host("bastion", down)
    error = failure(net.host("gpu1", last, "ProxyJump bastion"))
    assert isinstance(error, HostUnreachable)


def test_a_jump_host_that_cannot_reach_the_host(net):
    bastion, last = net.sshd(), net.sshd(start=False)
    net.host("bastion", bastion)
    error = failure(net.host("gpu1", last, "ProxyJump bastion"))
    assert isinstance(error, HostUnreachable)
    assert "bastion" in error.message


def test_a_proxy_command(net):
    server = net.sshd()
    script = net.folder / "pipe.py"
    script.write_text(
        "import os,socket,sys,threading\n"
        "s=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\n"
        "def up():\n"
        "    while True:\n"
        "        d=os.read(0,65536)\n"
        "        if not d: break\n"
        "        s.sendall(d)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while True:\n"
        "    d=s.recv(65536)\n"
        "    if not d: break\n"
        "    os.write(1,d)\n"
    )
    with Fleet.open([net.host("gpu1", server, f"ProxyCommand /usr/bin/python3 {script} %p")]) as fleet:
        assert not fleet.failures
        assert fleet.agents["gpu1"].call("files.stat", path="/").value["kind"] == "dir"


def test_a_bad_config_is_that_hosts_failure(net):
    server = net.sshd()
    good = net.host("gpu1", server)
    bad = Target("gpu2", ssh_config=str(net.folder / "none"))
    with Fleet.open([good, bad]) as fleet:
        assert list(fleet.agents) == ["gpu1"]
        assert isinstance(fleet.failures["gpu2"], HostFailure)
        assert "No such file" in str(fleet.failures["gpu2"])


def test_no_hosts_at_all():
    with Fleet.open([]) as fleet:
        assert not fleet.agents and not fleet.failures
        assert not fleet.map(lambda agent: 1).ok
