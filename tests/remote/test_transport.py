"""Which transport, with which arguments, and what its words mean: decided without a process."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from gpurun.errors import AuthenticationFailed, HostKeyMismatch, HostUnreachable
from gpurun.remote import system_ssh
from gpurun.remote.program import Heard, failure
from gpurun.remote.route import Choice, Proofs, Route, Target, choose_transport

HOST = Route("gpu1", "10.0.0.7", 22, "train", (), (), Target("gpu1", user="train", ssh_config="/etc/my ssh/100%"))
JUMP = Route("bastion", "10.0.0.1", 2222, "me", (), (), Target("bastion", jumps="outer"))
OUTER = Route("outer", "fe80::1", 22, "it's me", (), (), Target("outer"))
BEHIND = replace(HOST, jump=replace(JUMP, jump=OUTER))


def wish(name):
    return replace(HOST, target=replace(HOST.target, ssh=name))


@pytest.mark.parametrize(
    ("route", "proofs", "choice"),
    [
        (HOST, Proofs({}, plain=True, hardware=False), Choice("paramiko")),
        (HOST, Proofs({}, plain=False, hardware=False), Choice("paramiko")),
        (HOST, Proofs({HOST: "/s"}, plain=True, hardware=False), Choice("system")),
        (BEHIND, Proofs({OUTER: "/s"}, plain=True, hardware=False), Choice("system")),
        (wish("system"), Proofs({}, plain=True, hardware=False), Choice("system")),
        (wish("paramiko"), Proofs({HOST: "/s"}, plain=False, hardware=True), Choice("paramiko")),
        (HOST, Proofs({}, plain=False, hardware=True), Choice("system")),
        (HOST, Proofs({}, plain=True, hardware=False, certified=True), Choice("system")),
        (wish("paramiko"), Proofs({}, plain=True, hardware=False, certified=True), Choice("paramiko")),
        (HOST, Proofs({}, plain=True, hardware=True), Choice("paramiko", frozenset({"publickey"}))),
        (
            replace(HOST, beyond_keys=("gssapiauthentication",)),
            Proofs({}, plain=True, hardware=False),
            Choice("paramiko", frozenset({"gssapi-with-mic"})),
        ),
        (
            replace(HOST, beyond_keys=("gssapiauthentication",), public_keys=False),
            Proofs({}, plain=True, hardware=False),
            Choice("system"),
        ),
        (
            replace(HOST, jump=replace(JUMP, beyond_keys=("hostbasedauthentication", "pkcs11provider"))),
            Proofs({}, plain=True, hardware=False),
            Choice("paramiko", frozenset({"hostbased", "publickey"})),
        ),
        (replace(HOST, beyond_keys=("pkcs11provider",)), Proofs({}, plain=False, hardware=False), Choice("system")),
    ],
)
def test_the_transport_is_the_inventory_s_else_the_one_that_can_log_in(route, proofs, choice):
    assert choose_transport(route, proofs) == choice


def test_ssh_is_asked_only_for_what_the_host_wants():
    choice = Choice("paramiko", frozenset({"gssapi-with-mic"}))
    assert choice.asks_ssh({"publickey", "gssapi-with-mic"})
    assert not choice.asks_ssh({"publickey", "password"})
    assert not choice.asks_ssh(())


def options(argv):
    return [value for word, value in pairwise(argv) if word == "-o"]


@pytest.mark.parametrize("masters", [{}, {BEHIND: "/run/my 5% $", BEHIND.jump: "/j", OUTER: "/o"}])
def test_every_hop_checks_keys_and_none_shares_what_it_opens(masters):
    argv = system_ssh.session(BEHIND, masters, "exec true 'a b'")
    assert argv[-3:] == ["--", "gpu1", "exec true 'a b'"]
    for depth, hop in enumerate((BEHIND, BEHIND.jump, OUTER)):
        said = options(argv)
        assert "StrictHostKeyChecking=yes" in said and "BatchMode=yes" in said and "ControlMaster=no" in said
        path = masters.get(hop)
        assert ("ControlPath=" + (f'"{path.replace("%", "%%")}"' if path else "none")) in said
        assert "-J" not in argv
        proxies = [value for value in said if value.startswith("ProxyCommand=")]
        if hop is OUTER:
            assert proxies == [] and argv[-2:] == ["--", "outer"]
            assert argv[argv.index("-W") + 1] == "10.0.0.1:2222"
            break
        (proxy,) = proxies
        assert "%" not in proxy.replace("%%", ""), "no token is left to expand"
        argv = shlex.split(proxy.removeprefix("ProxyCommand=").replace("%%", "%"))
        assert argv[0] == "ssh", depth


def test_the_quickest_cipher_that_the_configuration_allows_comes_first():
    slow = "chacha20-poly1305@openssh.com,aes256-gcm@openssh.com,aes128-ctr"
    route = replace(HOST, ciphers=tuple(slow.split(",")))
    assert "Ciphers=aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr" in options(
        system_ssh.session(route, {}, "x")
    )
    assert not any(value.startswith("Ciphers") for value in options(system_ssh.session(HOST, {}, "x")))


def test_an_address_with_colons_is_put_in_brackets():
    argv = system_ssh.session(replace(HOST, hostname="fe80::2", jump=JUMP), {}, "true")
    (proxy,) = (value for value in options(argv) if value.startswith("ProxyCommand="))
    assert "-W '[fe80::2]:22'" in proxy


def test_what_a_later_ssh_would_do_otherwise_is_taken_back_and_nothing_else_is_named():
    assert "sessiontype=default" in options(system_ssh.session(replace(HOST, resets=("sessiontype=default",)), {}, "x"))
    assert not any(value.lower().startswith("sessiontype") for value in options(system_ssh.session(HOST, {}, "x")))


def test_a_shared_connection_outlives_the_terminal_and_its_way_asks_nothing():
    argv = system_ssh.master(BEHIND, {BEHIND: "/old", OUTER: "/o"}, "/new", 60)
    said = options(argv)
    first = {value.partition("=")[0]: value.partition("=")[2] for value in reversed(said)}
    assert (first["ControlPath"], first["ControlPersist"], first["ControlMaster"]) == ('"/new"', "60", "auto")
    assert first["ProxyCommand"].startswith("setsid ssh ") and "BatchMode=yes" in first["ProxyCommand"]
    assert "BatchMode" not in first and first["StrictHostKeyChecking"] == "yes"


def heard(*lines):
    made = Heard()
    for line in lines:
        for letter in line.encode() + b"\r\n":
            made.feed(bytes([letter]))
    made.feed(b"")
    return made


FAILURES = [
    (["Host key verification failed."], HostKeyMismatch, "Host key verification failed"),
    (["@" * 59, "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"], HostKeyMismatch, "CHANGED"),
    (["root@h: Permission denied (publickey,password)."], AuthenticationFailed, "there is no key to offer"),
    (
        ["Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures"],
        AuthenticationFailed,
        "Too many",
    ),
    (["connect to host h port 22: Connection refused"], HostUnreachable, "Connection refused"),
    (["bastion: no way", "Connection closed by UNKNOWN port 65535"], HostUnreachable, "says: bastion: no way"),
    (["Connection closed by UNKNOWN port 65535"], HostUnreachable, "Connection closed"),
    ([], HostUnreachable, "says: nothing"),
    (["debug1: Reading configuration", "", "OpenSSH_9.2p1"], HostUnreachable, "says: nothing"),
]


@pytest.mark.parametrize(("lines", "kind", "text"), FAILURES)
def test_ssh_s_last_words_become_the_errors_that_both_transports_have(lines, kind, text):
    error = failure("gpu1", "train", heard(*lines))
    assert type(error) is kind and text in error.message and error.host == "gpu1" and error.hint


@pytest.mark.parametrize(
    ("methods", "hint"),
    [("publickey", "ssh gpu1"), ("keyboard-interactive", "inventory connect gpu1"), ("password", "inventory connect")],
)
def test_a_host_that_wants_a_person_names_the_command_for_one(methods, hint):
    said = heard(
        "debug1: Offering public key: /k with space ED25519 SHA256:x explicit", f"h: Permission denied ({methods})."
    )
    error = failure("gpu1", "train", said)
    assert "/k with space does not suffice" in error.message and hint in error.hint


def test_a_hostile_host_fills_nothing_and_is_not_believed_after_the_login():
    said = heard('Authenticated to 10.0.0.7 ([10.0.0.7]:22) using "publickey".')
    assert said.connected and said.logged_in
    said.feed(b"debug1: Server host key: ssh-rsa SHA256:forged\nx" * 10_000)
    said.feed(b"\xff" * 1_000_000)
    assert said.host_key is None
    assert sum(map(len, said.lines)) < 40 * 600 and len(said._rest) <= 500
