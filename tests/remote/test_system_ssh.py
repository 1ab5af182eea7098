"""The machine's own ``ssh`` as a transport: shared connections, strictness, processes that end."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from base64 import b64encode
from contextlib import contextmanager
from pathlib import Path

import pytest
from how_many import count
from terminal import typed
from test_ways import at_rest, children, lives, resident_kib, sessions
from waiting import LIMIT_S, until

from gpurun.errors import AuthenticationFailed, HostKeyMismatch, HostUnreachable
from gpurun.remote import Fleet, opening, session, system_ssh, trust
from gpurun.remote.route import resolve
from gpurun.remote.system_ssh import _answers, is_quotable, is_usable, own_path

RECONNECTS = int(os.environ.get("GPURUN_RECONNECTS", count("reconnects over ssh")))
EVERYTHING_ODD = (
    "RemoteCommand sleep 1000",
    "RequestTTY force",
    "LocalForward 127.0.0.1:1 127.0.0.1:1",
    "ExitOnForwardFailure yes",
    "ForkAfterAuthentication yes",
    "StdinNull yes",
    "SessionType none",
    "ControlMaster auto",
    "ControlPersist yes",
    "LogLevel QUIET",
    "EscapeChar x",
    "PermitLocalCommand yes",
    "LocalCommand sleep 1000",
    "ForwardAgent yes",
    "VisualHostKey yes",
    "BatchMode no",
)


@pytest.fixture
def short():
    """A folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_sockets(short, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(short / "config"))
    monkeypatch.setattr(opening, "ONLY_SSH", {})
    yield
    for left in (short / "config").glob("gpurun/ssh/*"):  # of a test that failed
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={left}", "any"], capture_output=True)


@pytest.fixture
def started(monkeypatch):
    """The command line of each ``ssh`` that ran a command."""
    real, found = system_ssh.SystemSsh.__init__, []

    def noted(self, argv):
        found.append(argv)
        real(self, argv)

    monkeypatch.setattr(system_ssh.SystemSsh, "__init__", noted)
    return found


@contextmanager
def shared(net, name, *words):
    """A connection that a person has opened, with a key that no configuration names."""
    options = ["-o", "ControlMaster=yes", "-o", "ControlPersist=60", *words]
    subprocess.run(["ssh", "-F", str(net.ssh_config), *options, name, "true"], check=True, timeout=LIMIT_S)
    try:
        yield
    finally:
        subprocess.run(["ssh", "-F", str(net.ssh_config), "-O", "exit", name], capture_output=True)


def works(agent) -> bool:
    return agent.call("files.stat", path="/").value["kind"] == "dir"


def only_for(net, *lines):
    """A host that accepts a key which gpurun is not told of."""
    server, key = net.sshd(), net.new_key("secret")
    (server.folder / "authorized_keys").write_text(net.public(key) + "\n")
    return server, net.host("gpu1", server, *lines), ["-i", str(key)]


def test_a_host_that_lets_nobody_in_is_reached_over_the_connection_that_a_person_has_opened(net, short, started):
    server, target, key = only_for(net, f"ControlPath {short}/%C")
    with Fleet.open([target]) as fleet:
        assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)
    with shared(net, "gpu1", *key):
        until(lambda: sessions(server) == 1)
        with Fleet.open([target]) as one, Fleet.open([target]) as two:
            assert not one.failures and not two.failures
            assert works(one.agents["gpu1"]) and works(two.agents["gpu1"])
            assert sessions(server) == 1, "both share the connection"
        assert len(started) == 2
    with Fleet.open([target]) as fleet:
        assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)


def test_a_shared_connection_that_was_opened_without_a_check_of_the_host_s_key_is_not_used(net, short, started):
    _, target, key = only_for(net, f"ControlPath {short}/%C", "StrictHostKeyChecking no")
    with shared(net, "gpu1", *key), Fleet.open([target]) as fleet:
        assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)
    assert not started


def test_a_key_is_fetched_through_a_jump_host_over_its_shared_connection(net, short):
    jump, last, key = net.sshd(), net.sshd(), net.new_key("secret")
    (jump.folder / "authorized_keys").write_text(net.public(key) + "\n")
    net.host("bastion", jump, f"ControlPath {short}/%C")
    route = resolve(net.host("gpu1", last, "ProxyJump bastion"))
    assert trust.offers([route], ssh_config=str(net.ssh_config))[0].state == "unreachable"
    with shared(net, "bastion", "-i", str(key)):
        assert trust.offers([route], ssh_config=str(net.ssh_config))[0].state == "known"


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_socket_that_others_can_put_there_is_not_used(net, short, started, mode):
    folder = short / "open"
    folder.mkdir()
    _, target, key = only_for(net, f"ControlPath {folder}/%C")
    with shared(net, "gpu1", *key):
        folder.chmod(mode)
        with Fleet.open([target]) as fleet:
            assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)
        folder.chmod(mode | 0o1000)  # sticky, as /tmp: nobody else can replace it
        with Fleet.open([target]) as fleet:
            assert not fleet.failures
    assert len(started) == 1


def test_what_is_no_living_socket_of_this_user_is_not_used(net, short, monkeypatch):
    path = str(short / "s")
    assert not is_usable(path)
    Path(path).write_text("a file")
    assert not is_usable(path)
    Path(path).unlink()
    (short / "real").mkdir()
    with subprocess.Popen([sys.executable, "-c", f"import socket; socket.socket(1).bind({path!r})"]):
        pass
    assert is_usable(path) and not _answers(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_usable(path), "another user's"
    monkeypatch.undo()
    (short / "link").symlink_to(path)
    assert not is_usable(str(short / "link"))
    assert not is_usable(str(short / ("x" * 200)))
    for odd in ('"', "$", "\\", "\n"):
        assert not is_quotable(f"/tmp/{odd}")


def test_whatever_the_configuration_says_one_plain_command_runs(net, short):
    server, known = net.sshd(), children()
    net.ssh = "system"
    target = net.host("gpu1", server, *EVERYTHING_ODD, f"ControlPath {short}/%C")
    with Fleet.open([target]) as fleet:
        assert not fleet.failures
        assert works(fleet.agents["gpu1"])
    until(lambda: children() <= known)
    until(lambda: sessions(server) == 0)
    assert not list(short.glob("[!c]*")), "no connection is left to share"


def test_a_jump_host_with_another_key_is_refused_though_the_configuration_would_accept_it(net):
    jump, last = net.sshd(), net.sshd()
    net.ssh = "system"
    net.known_hosts.write_text(f"[127.0.0.1]:{last.port} {net.public(last.host_keys[0])}\n")
    net.host("bastion", jump, "StrictHostKeyChecking no")
    with Fleet.open([net.host("gpu1", last, "ProxyJump bastion", "StrictHostKeyChecking no")]) as fleet:
        error = fleet.failures["gpu1"]
    assert isinstance(error, HostKeyMismatch), error
    assert f"[127.0.0.1]:{jump.port}" in error.message
    assert str(jump.port) not in net.known_hosts.read_text()


def test_names_and_paths_pass_two_shells_as_they_are(net, tmp_path):
    odd = tmp_path / """it's 100% "odd" $HOME %h"""
    odd.mkdir()
    jump, middle, last = net.sshd(), net.sshd(), net.sshd()
    net.ssh = "system"
    net.host("first", jump)
    net.host("second", middle)
    net.host("gpu1", last, "ProxyJump first,second")
    net.ssh_config = Path(shutil.copy(net.ssh_config, odd / "config"))
    with Fleet.open([net.host("gpu2", last, "ProxyJump first,second")]) as fleet:
        assert not fleet.failures
        assert works(fleet.agents["gpu2"])


def test_ssh_is_tried_where_paramiko_s_keys_are_refused_and_remembered(net, started, monkeypatch):
    server, tried = net.sshd(), []
    target = net.host("gpu1", server, "PKCS11Provider /no/such/library.so")
    monkeypatch.setattr(session, "identities", lambda route: tried.append(route) or iter(()))
    for attempt in (1, 2):
        with Fleet.open([target]) as fleet:
            assert not fleet.failures
            assert works(fleet.agents["gpu1"])
        assert (len(tried), len(started)) == (1, attempt)


def test_ssh_is_not_tried_where_the_host_offers_nothing_more(net, started):
    server = net.sshd()
    (server.folder / "authorized_keys").write_text("")
    with Fleet.open([net.host("gpu1", server, "GSSAPIAuthentication yes")]) as fleet:
        assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)
    assert not started


@pytest.mark.parametrize("kind", ["sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"])
def test_a_fido_key_alone_is_left_to_ssh(net, started, kind):
    body = b64encode(b"openssh-key-v1\0" + kind.encode() + bytes(64))
    net.key.write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + body + b"\n-----END OPENSSH PRIVATE KEY-----\n")
    with Fleet.open([net.host("gpu1", net.sshd())]) as fleet:
        assert fleet.failures
    assert len(started) == 1


def test_a_killed_ssh_is_a_lost_host_that_comes_back(net, started):
    server, known = net.sshd(), children()
    net.ssh = "system"
    target = net.host("gpu1", server)
    with Fleet.open([target]) as fleet:
        (pid,) = children() - known
        os.kill(pid, signal.SIGKILL)
        until(lambda: not fleet.agents["gpu1"].alive)
        with pytest.raises(HostUnreachable):
            fleet.agents["gpu1"].call("files.stat", path="/")
        fleet.absorb(Fleet.open([target]))
        assert works(fleet.agents["gpu1"])
    until(lambda: children() <= known)


def test_the_processes_end_with_a_gpurun_that_is_killed(net):
    server = net.sshd()
    target = net.host("gpu1", server)
    script = (
        "import sys, time; from gpurun.remote import Fleet, Target\n"
        f"fleet = Fleet.open([Target('gpu1', ssh_config={target.ssh_config!r}, ssh='system')], timeout_s=60)\n"
        "assert not fleet.failures, fleet.failures\n"
        "print(fleet.agents['gpu1'].hello['pid'], flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        agent = int(process.stdout.readline())
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True)
        (ssh,) = map(int, listed.stdout.split())
        process.kill()
    until(lambda: not Path(f"/proc/{agent}").exists())
    until(lambda: sessions(server) == 0)
    until(lambda: not lives(ssh))


def test_many_reconnects_leave_nothing_behind(net, short):
    """A third by keys, a third through a jump host, a third over a shared connection."""
    server, jump, known, held_then = net.sshd(), net.sshd(), children(), []
    net.ssh = "system"
    net.host("bastion", jump)
    targets = [net.host("gpu0", server), net.host("gpu1", server, "ProxyJump bastion")]
    targets.append(net.host("gpu2", server, f"ControlPath {short}/%C"))
    with shared(net, "gpu2"):
        for fifth in range(5):
            for number in range(fifth, RECONNECTS, 5):
                with Fleet.open([targets[number % 3]]) as fleet:
                    assert not fleet.failures, fleet.failures
            if fifth in (0, 2, 4):
                until(lambda: sessions(server) == 1 and sessions(jump) == 0)
                held_then.append((*at_rest(known), resident_kib()))
    print(f"threads, descriptors and KiB after a fifth, three fifths, and {RECONNECTS}: {held_then}")  # noqa: T201
    began, middle, ended = held_then
    assert ended[0] <= began[0]
    assert ended[1] <= began[1]
    assert ended[2] <= 1.05 * middle[2] or RECONNECTS < 500, "the first ones fill caches and threads' heaps"


def test_a_person_answers_once_and_everybody_shares_the_connection(net, short, tmp_path):
    """The host's key has a passphrase, which only a person knows; typed on a terminal."""
    server = net.sshd()
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(net.key)], check=True)
    jump = net.sshd()
    net.host("bastion", jump)
    target = net.host("gpu1", server, "ProxyJump bastion")
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(
        "version: 1\ndefaults: {generation: pascal, gpus: 1, fabric: f}\nfabrics: {f: {kind: tcp, interface: lo}}\n"
        f"racks: {{r1: {{hosts: {{gpu1: {{}}}}}}}}\nssh_config: {net.ssh_config}\n"
    )
    command = [sys.executable, "-m", "gpurun", "inventory", "connect", "gpu1", "-i", str(inventory)]
    nobody = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert nobody.returncode == 2 and "run this command in a terminal: gpurun inventory connect gpu1" in nobody.stderr
    code, printed = typed(command, {"passphrase for key": "open sesame"})
    assert code == 0, printed
    assert "open sesame" not in printed
    with Fleet.open([target]) as one, Fleet.open([target]) as two:
        assert not one.failures and not two.failures, {**one.failures, **two.failures}
        assert works(one.agents["gpu1"]) and works(two.agents["gpu1"])
        assert sessions(server) == 1
    folder = short / "config" / "gpurun" / "ssh"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 2
    assert "asks" not in typed(command, {})[1], "what is open is not asked for again"
    closed = subprocess.run([*command, "--close"], capture_output=True, text=True)
    assert "2 connections closed" in closed.stderr + closed.stdout
    until(lambda: sessions(server) == sessions(jump) == 0)
    assert list(folder.iterdir()) == []
    with Fleet.open([target]) as fleet:
        assert isinstance(fleet.failures["gpu1"], AuthenticationFailed)


def test_the_way_says_whose_connection_is_shared(net):
    server = net.sshd()
    one, other = (resolve(net.host(name, server)) for name in ("gpu1", "gpu2"))
    assert own_path(one) == own_path(other), "one machine, one user"
    elsewhere = resolve(net.host("gpu3", net.sshd(start=False)))
    through = resolve(net.host("gpu4", server, "ProxyJump gpu1"))
    assert len({own_path(route) for route in (one, elsewhere, through)}) == 3
    assert getpass.getuser() not in str(own_path(one)).removeprefix(os.environ["XDG_CONFIG_HOME"])


def test_no_more_connections_log_in_to_a_jump_host_at_once_than_its_sshd_takes(net, monkeypatch):
    """sshd with its defaults drops every third of more than ten; this one all of more than four."""
    monkeypatch.setattr(system_ssh, "MOST_LOGINS", 2)
    monkeypatch.setattr(system_ssh, "_LOGIN_S", LIMIT_S)
    net.ssh = "system"
    net.host("bastion", net.sshd("MaxStartups 4:100:4"))
    server = net.sshd()
    with Fleet.open([net.host(f"gpu{at}", server, "ProxyJump bastion") for at in range(8)]) as fleet:
        assert not fleet.failures, {host: error.message for host, error in fleet.failures.items()}


@pytest.mark.parametrize("way", ["", "ProxyJump bastion"])
def test_a_connection_that_a_busy_sshd_drops_is_tried_once_more(net, monkeypatch, way):
    net.ssh = "system"
    busy, server = net.sshd("MaxStartups 1:100:1", "LoginGraceTime 600"), net.sshd()
    net.host("bastion", busy)
    target = net.host("gpu1", server if way else busy, way)
    until(lambda: sessions(busy) == 0)  # whoever asked whether it has started
    stranger = socket.create_connection(("127.0.0.1", busy.port))
    assert stranger.recv(4) == b"SSH-"
    tries = []

    def leaves(_seconds):
        tries.append(_seconds)
        stranger.close()
        until(lambda: sessions(busy) == 0)

    monkeypatch.setattr(system_ssh.time, "sleep", lambda seconds: leaves(seconds) if seconds > 0.1 else None)
    with Fleet.open([target]) as fleet:
        assert not fleet.failures, {host: error.message for host, error in fleet.failures.items()}
    assert len(tries) == 1
