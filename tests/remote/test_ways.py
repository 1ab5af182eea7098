"""Ways to a host that are not a plain connection: jump hosts, which are shared, and programs."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from how_many import count
from waiting import LIMIT_S, until

from gpurun.errors import HostKeyMismatch, HostUnreachable
from gpurun.remote import Fleet, Target, opening, session
from gpurun.remote.route import resolve

PIPE = """
import os, socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while data := os.read(0, 65536):
        s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := s.recv(65536):
    os.write(1, data)
"""
RECONNECTS = int(os.environ.get("GPURUN_RECONNECTS", count("reconnects over paramiko")))
AT_ONCE = 8


@pytest.fixture
def connected(monkeypatch):
    """How often each host was connected to."""
    connect, counts = session.connect, Counter()

    def counted(route, attempt, jumps):
        counts[route.name] += 1
        return connect(route, attempt, jumps)

    monkeypatch.setattr(session, "connect", counted)
    return counts


@pytest.fixture
def pipe(tmp_path):
    """A program that connects to a port of this machine; its path needs quotes in a shell."""
    folder = tmp_path / 'it\'s a "pipe" $x'
    folder.mkdir()
    (folder / "pipe.py").write_text(PIPE)
    return folder / "pipe.py"


def program(pipe: Path) -> str:
    return f'{sys.executable} "{str(pipe).translate({34: chr(92) + chr(34), 36: chr(92) + chr(36)})}" %p'


def sessions(server) -> int:
    """How many connections an sshd serves."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, check=False)
    return len(listed.stdout.split())


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def lives(session_id: int) -> bool:
    """Whether a process of a session lives; an orphan that nobody reaps does not."""
    listed = subprocess.run(["ps", "-o", "stat=", "-s", str(session_id)], capture_output=True, check=False)
    return any(not state.startswith(b"Z") for state in listed.stdout.split())


def test_a_jump_host_has_one_connection_for_all_and_loses_it_with_the_last(net, connected):
    jump, last = net.sshd(), net.sshd()
    net.host("bastion", jump)
    targets = [net.host(f"gpu{number}", last, "ProxyJump bastion") for number in range(4)]
    first, second = Fleet.open(targets[:3]), Fleet.open(targets[3:])
    assert not first.failures and not second.failures
    assert connected == {"bastion": 1, **{target.name: 1 for target in targets}}
    assert sessions(jump) == 1
    first.close()
    until(lambda: sessions(last) == 1)
    assert second.agents["gpu3"].call("files.stat", path="/").value["kind"] == "dir"
    second.close()
    until(lambda: sessions(jump) == 0)
    assert not opening.JUMPS._shared


def test_a_host_that_never_answers_leaves_the_jump_host_to_the_others(net, connected, monkeypatch):
    jump, last, silent = net.sshd(), net.sshd(), socket.create_server(("127.0.0.1", 0))
    net.host("bastion", jump)
    good = net.host("gpu1", last, "ProxyJump bastion")
    net.host("dead", last, "ProxyJump bastion")
    dead = Target("dead", address="127.0.0.1", port=silent.getsockname()[1], ssh_config=good.ssh_config)
    opened = threading.Event()
    answered: list[Fleet] = []

    def open_dead():
        answered.append(Fleet.open([dead], timeout_s=4.0))

    with silent:
        thread = threading.Thread(target=open_dead)
        thread.start()
        until(lambda: connected["bastion"] == 1)
        with Fleet.open([good]) as fleet:
            opened.set()
            assert not fleet.failures
            thread.join()
            assert isinstance(answered[0].failures["dead"], HostUnreachable)
            assert connected["bastion"] == 1, "the connection that the dead host's try has made is shared"
            assert fleet.agents["gpu1"].call("files.stat", path="/").value["kind"] == "dir"
    until(lambda: not opening.JUMPS._shared)


def test_a_jump_host_that_comes_back_is_connected_to_again(net, connected):
    jump, last = net.sshd(), net.sshd()
    net.host("bastion", jump)
    target = net.host("gpu1", last, "ProxyJump bastion")
    with Fleet.open([target]) as fleet:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(jump.process.pid)], capture_output=True, check=True)
        for pid in listed.stdout.split():
            os.kill(int(pid), 9)
        until(lambda: not fleet.agents["gpu1"].alive)
        fleet.absorb(Fleet.open([target]))
        assert fleet.agents["gpu1"].call("files.stat", path="/").value["kind"] == "dir"
        assert connected["bastion"] == 2
    until(lambda: not opening.JUMPS._shared)


WAYS = ("ProxyJump first", "ProxyCommand PROGRAM", "ProxyJump first,down")


def test_many_reconnects_leave_nothing_behind(net, pipe):
    first, last, known = net.sshd(), net.sshd(), children()
    net.host("first", first)
    net.host("down", net.sshd(start=False))
    routes = [
        resolve(net.host(f"gpu{number}", last, way.replace("PROGRAM", program(pipe))))
        for number, way in enumerate(WAYS)
    ]

    def reconnect(number):
        attempt = session.Attempt(time.monotonic() + LIMIT_S)
        if "down" not in WAYS[number % 3]:
            session.connect(routes[number % 3], attempt, opening.JUMPS).close()
            return
        with pytest.raises(HostUnreachable):
            session.connect(routes[number % 3], attempt, opening.JUMPS)

    held_then = []
    for fifth in range(5):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert not any(pool.map(reconnect, range(fifth, RECONNECTS, 5)))
        if fifth in (0, 2, 4):
            until(lambda: sessions(first) == sessions(last) == 0)
            held_then.append((*at_rest(known), resident_kib()))
    print(f"threads, descriptors and KiB after a fifth, three fifths, and {RECONNECTS}: {held_then}")  # noqa: T201
    began, middle, ended = held_then
    assert ended[0] <= began[0]
    assert ended[1] <= began[1]
    assert ended[2] <= 1.05 * middle[2] or RECONNECTS < 1000, "the first ones fill caches and threads' heaps"
    assert not opening.JUMPS._shared


def resident_kib() -> int:
    """Memory of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def at_rest(known: set[int]) -> tuple[int, int]:
    """Threads and descriptors once closing has ended."""
    until(lambda: children() <= known)
    seen = held()
    for _ in range(20):
        time.sleep(0.05)
        seen = (min(seen[0], held()[0]), min(seen[1], held()[1]))
    return seen


def test_a_proxy_command_is_run_by_the_user_s_shell_as_openssh_runs_it(net, pipe, tmp_path, monkeypatch):
    shell, log = tmp_path / "my shell", tmp_path / "log"
    shell.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" >> "{log}"\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("SHELL", str(shell))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    server = net.sshd()
    target = net.host("gpu1", server, f'ProxyCommand {program(pipe)} 2>"$TRACE" | tee "$TRACE-%n-100%%"')
    with Fleet.open([target]) as fleet:
        assert not fleet.failures
        assert fleet.agents["gpu1"].call("files.stat", path="/").value["kind"] == "dir"
    ours = log.read_text()
    assert ours.startswith(f"{shell}\n-c\nexec {sys.executable} ")
    assert (tmp_path / "trace-gpu1-100%").read_bytes().startswith(b"SSH-2.0")
    log.unlink()
    subprocess.run(["ssh", "-F", str(net.ssh_config), "-o", "BatchMode=yes", "gpu1", "true"], check=True)
    assert log.read_text() == ours, "ssh itself runs it the same way"


def test_a_proxy_command_may_fetch_the_key_that_known_hosts_gets(net, pipe):
    """As sss_ssh_knownhostsproxy does: sssd drops the keys after a while, and fetches them at each connection."""
    server = net.sshd()
    keys = net.known_hosts.read_text()
    net.known_hosts.write_text("")
    fetch = f"echo {shlex.quote(keys.strip())} > {shlex.quote(str(net.known_hosts))}; exec {program(pipe)}"
    with Fleet.open([net.host("gpu1", server, f"ProxyCommand sh -c {shlex.quote(fetch)}")]) as fleet:
        assert not fleet.failures
    other = net.new_key("other")
    net.known_hosts.write_text("")
    fetch = fetch.replace(keys.split()[2], net.public(other).split()[1])
    with Fleet.open([net.host("gpu2", server, f"ProxyCommand sh -c {shlex.quote(fetch)}")]) as fleet:
        assert isinstance(fleet.failures["gpu2"], HostKeyMismatch)


def test_a_host_is_known_by_the_authority_that_signed_its_certificate(net):
    authority, stranger = net.new_key("authority"), net.new_key("stranger")
    net.known_hosts.write_text("")
    signed, forged = net.sshd(start=False), net.sshd(start=False)
    for server, signer in ((signed, authority), (forged, stranger)):
        key = server.host_keys[0]
        subprocess.run(["ssh-keygen", "-q", "-h", "-s", signer, "-I", "x", "-n", "127.0.0.1", f"{key}.pub"], check=True)
        server.start(f"HostCertificate {key}-cert.pub")
    net.known_hosts.write_text(f"@cert-authority [127.0.0.1]:* {net.public(authority)}\n")
    with Fleet.open([net.host("gpu1", signed), net.host("gpu2", forged)]) as fleet:
        assert list(fleet.failures) == ["gpu2"] and isinstance(fleet.failures["gpu2"], HostKeyMismatch)
        assert fleet.agents["gpu1"].call("files.stat", path="/").value["kind"] == "dir"


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_proxy_command_ends_with_the_session_with_all_its_parts(net, pipe, stubborn):
    server, known = net.sshd(), children()
    command = f"sh -c 'sleep 1000 & trap {'' if stubborn else '-'} HUP; exec \"$@\"' sh {program(pipe)}"
    command = command.replace("trap  HUP", 'trap "" HUP')
    with Fleet.open([net.host("gpu1", server, f"ProxyCommand {command}")]) as fleet:
        assert not fleet.failures
        (pid,) = children() - known
        assert os.getpgid(pid) == pid != os.getpgid(0)
    until(lambda: children() <= known)
    until(lambda: not lives(pid))


NOWHERE = {
    "says-why": ("sh -c 'echo no way in >&2; exit 3'", "no way in"),
    "none": ("/no/such/program", "/no/such/program"),
    "complains-without-end": ("sh -c 'yes x >&2'", "did not answer"),
    "sleeps": ("sleep 1000", "did not answer"),
    "noise": ("cat /dev/zero", ""),
    "echo": ("cat", ""),
}


def test_a_proxy_command_that_reaches_nothing_is_that_host_s_failure(net):
    server, known = net.sshd(), children()
    targets = [net.host(name, server, f"ProxyCommand {command}") for name, (command, _) in NOWHERE.items()]
    with Fleet.open(targets, timeout_s=3.0) as fleet:
        assert list(fleet.failures) == list(NOWHERE)
        for name, error in fleet.failures.items():
            assert isinstance(error, HostUnreachable)
            assert NOWHERE[name][1] in str(error)
    until(lambda: children() <= known)


def test_a_shell_that_is_not_there_is_that_host_s_failure(net, monkeypatch):
    monkeypatch.setenv("SHELL", "/no/such/shell")
    with Fleet.open([net.host("gpu1", net.sshd(), "ProxyCommand true")]) as fleet:
        assert "/no/such/shell" in str(fleet.failures["gpu1"])


@pytest.mark.parametrize("script", ["exit 0", "echo hostname x; echo port; echo user", "printf 'port x\\nuser\\0'"])
def test_a_program_ssh_that_is_not_openssh_s_is_that_host_s_failure(net, monkeypatch, tmp_path, script):
    target = net.host("gpu1", net.sshd())
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Fleet.open([target]) as fleet:
        assert "does not say" in str(fleet.failures["gpu1"])


def test_without_the_ssh_program_every_host_s_failure_says_what_to_install(net, monkeypatch, tmp_path):
    target = net.host("gpu1", net.sshd())
    monkeypatch.setenv("PATH", str(tmp_path))
    with Fleet.open([target]) as fleet:
        error = fleet.failures["gpu1"]
        assert "cannot run ssh" in str(error) and "OpenSSH client" in str(error.hint)
