"""`ssh -G` is asked once for each host, until something changes that decides its answer."""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from gpurun.errors import BadInput
from gpurun.remote import Fleet, Target
from gpurun.remote import route as openssh
from gpurun.remote import route as ssh_config_cache
from gpurun.remote.route import resolve, resolve_all


class Asked:
    """The calls of `ssh -G`: their hosts, and how many ran at once."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def taken(self) -> list[str]:
        taken, self.hosts = self.hosts, []
        return sorted(taken)


@pytest.fixture
def asked(monkeypatch):
    calls, ask = Asked(), openssh._ask

    def counted(target):
        with calls.lock:
            calls.hosts.append(target.name)
            calls.at_once += 1
            calls.most_at_once = max(calls.most_at_once, calls.at_once)
        try:
            return ask(target)
        finally:
            with calls.lock:
                calls.at_once -= 1

    monkeypatch.setattr(openssh, "_ask", counted)
    return calls


@pytest.fixture
def config(tmp_path, monkeypatch):
    folder = tmp_path / "a'; ü #"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "conf.d" / "1 ö.conf").write_text("Host gpu1\n User inner\n")
    path = folder / "config"
    path.write_text(f'Include "{folder}/conf.d/*.conf"\nUserKnownHostsFile ${{KNOWN}}\nUser outer\nProxyCommand true\n')
    monkeypatch.setenv("KNOWN", "/k")
    return path


def routes(config, *hosts, **given):
    """Routes to `first`, which is asked each time, and to hosts whose answers can be kept."""
    targets = [Target(host, ssh_config=str(config), **given) for host in ("first", *hosts)]
    return list(resolve_all(targets).values())[1:]


def test_resolving_many_hosts_starts_one_process_for_each_and_later_one_for_all(tmp_path, asked):
    config = tmp_path / "config"
    config.write_text("Host gpu*\n ProxyJump j1,j2\nHost *\n Port 2222\n")
    names = [f"gpu{number}" for number in range(40)]
    for _ in range(3):
        found = routes(config, *names)
        assert {route.jump.jump.port for route in found} == {2222}
    assert asked.taken() == sorted(["j1", "j2", "first", *names] + 2 * ["j1", "j2", "first"])
    assert 1 < asked.most_at_once <= openssh.PROCESSES_AT_ONCE
    (kept,) = (tmp_path / "cache" / "gpurun" / "ssh").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_hosts_that_come_later_add_to_what_is_kept(config, asked):
    for host in ("gpu1", "gpu2", "gpu1", "gpu2"):
        routes(config, host)
    assert asked.taken() == ["first"] * 4 + ["gpu1", "gpu2"]


def test_another_address_port_or_user_is_another_question(config, asked):
    for _ in range(2):
        for given in ({}, {"address": "10.0.0.1"}, {"port": 9}, {"user": "u"}):
            routes(config, "gpu1", **given)
    assert asked.taken() == ["first"] * 8 + ["gpu1"] * 4


def edit(config, monkeypatch):
    """Its size and time stamps stay as they were."""
    before = config.stat()
    config.write_text(config.read_text().replace("outer", "newer"))
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))


def lead_a_link_elsewhere(config, monkeypatch):
    config.rename(config.with_name("real"))
    config.with_name("new").write_text("User newer\n")
    config.symlink_to("new")


def add_a_file(config, monkeypatch):
    (config.parent / "conf.d" / "0.conf").write_text("Host gpu2\n User newer\n")


def change_a_variable(config, monkeypatch):
    monkeypatch.setenv("KNOWN", "/other")


def rename_the_machine(config, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "other")


def move_home(config, monkeypatch):
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((*me[:5], "/other", me[6])))


def install_another_ssh(config, monkeypatch):
    folder = config.parent / "bin"
    folder.mkdir()
    (folder / "ssh").write_text('#!/bin/sh\necho OpenSSH_99.9 >&2\nPATH=${PATH#*:}\nexec ssh "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def install_another_gpurun(config, monkeypatch):
    monkeypatch.setattr(ssh_config_cache, "CODE", "newer")


EDITS = [edit, lead_a_link_elsewhere, add_a_file]
OTHERS = [change_a_variable, rename_the_machine, move_home, install_another_ssh, install_another_gpurun]


@pytest.mark.parametrize("change", EDITS + OTHERS)
def test_ssh_is_asked_again_after_a_change(config, asked, change, monkeypatch):
    (before,) = routes(config, "gpu2")
    assert (before.user, asked.taken()) == ("outer", ["first", "gpu2"])
    change(config, monkeypatch)
    for expected in (["first", "gpu2"], ["first"]):
        (found,) = routes(config, "gpu2")
        assert asked.taken() == expected
        assert found.user == ("newer" if change in EDITS else "outer")
        if change is change_a_variable:
            assert found.known_hosts[0] == "/other"


def test_a_file_that_changes_while_ssh_is_asked_is_not_taken_for_what_it_was(config, monkeypatch):
    ask, texts = openssh._ask, ["User a\n", "User b\n"]

    def asked(target):
        answer = ask(target)
        if target.name == "gpu2":
            config.write_text(texts[1])
        return answer

    config.write_text(texts[0])
    monkeypatch.setattr(openssh, "_ask", asked)
    assert routes(config, "gpu2")[0].user == "a"
    for text, user in zip(texts, "ab", strict=True):
        config.write_text(text)
        assert routes(config, "gpu2")[0].user == user


@pytest.mark.parametrize(
    "text",
    [
        'Match exec "true"\n User u\n',
        "CanonicalizeHostname yes\nCanonicalDomains example.invalid\n",
        "CanonicalizePermittedCNAMEs *.invalid:*.invalid\n",
        "# Match localnetwork 10.0.0.0/8\n",
        'Include "DIR/new?line/*.conf"\n',
    ],
)
def test_what_files_alone_do_not_decide_is_asked_every_time(tmp_path, asked, text):
    odd = tmp_path / "new\nline"
    odd.mkdir()
    (odd / "a.conf").write_text("Port 7\n")
    config = tmp_path / "config"
    config.write_text(text.replace("DIR", str(tmp_path)))
    for _ in range(2):
        routes(config, "localhost")
    assert asked.taken() == ["first"] * 2 + ["localhost"] * 2


def test_hosts_that_no_command_is_run_for_are_kept(tmp_path, asked):
    config = tmp_path / "config"
    config.write_text('Match originalhost gpu2 exec "true"\n User u\n')
    for _ in range(3):
        routes(config, "gpu1", "gpu2", "gpu3")
    assert asked.taken() == ["first"] * 3 + ["gpu1", "gpu2", "gpu2", "gpu2", "gpu3"]


def forge(kept: Path, config: Path) -> None:
    """What a hostile program with write access to the cache folder can do best: a sound file but for the key."""
    state, texts = msgspec.msgpack.decode(kept.read_bytes()[32:])
    texts = {key: text.replace(b"proxycommand true", b"proxycommand evil") for key, text in texts.items()}
    payload = msgspec.msgpack.encode((state, texts))
    kept.write_bytes(hashlib.sha256(payload).digest() + payload)


def swap(kept: Path, config: Path) -> None:
    other = config.with_name("other")
    other.write_text("ProxyCommand evil\n")
    routes(other, "gpu1")
    (another,) = set(kept.parent.iterdir()) - {kept}
    another.rename(kept)


def pipe(kept: Path, config: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)


def cut(kept: Path, config: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:-1])


def link(kept: Path, config: Path) -> None:
    kept.rename(kept.with_name("moved"))
    kept.symlink_to("moved")


def open_to_others(kept: Path, config: Path) -> None:
    kept.chmod(0o666)


@pytest.mark.parametrize("trick", [forge, swap, pipe, cut, link, open_to_others])
def test_who_writes_into_the_cache_folder_changes_no_route(config, asked, trick):
    before = routes(config, "gpu1")
    (kept,) = Path(os.environ["XDG_CACHE_HOME"], "gpurun/ssh").iterdir()
    trick(kept, config)
    asked.taken()
    assert routes(config, "gpu1") == before
    assert before[0].proxy_command == "true"
    assert asked.taken() == ["first", "gpu1"]


@pytest.mark.parametrize("place", ["/proc/nowhere", "relative", ""])
def test_without_a_place_for_caches_ssh_is_asked_about_every_host(config, asked, place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    for _ in range(2):
        assert routes(config, "gpu1")[0].user == "inner"
    assert asked.taken() == ["first"] * 2 + ["gpu1"] * 2


def test_a_user_without_an_account_gets_one_clear_error_for_each_host(config, asked, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(BadInput, match=f"uid {os.getuid()} has no account on this machine") as caught:
        resolve(Target("gpu1", ssh_config=str(config)))
    assert "give the user an account" in str(caught.value.hint)
    with Fleet.open([Target(f"gpu{number}", ssh_config=str(config)) for number in range(100)]) as fleet:
        assert not fleet.agents
        assert {(error.message, error.hint) for error in fleet.failures.values()} == {
            (caught.value.message, caught.value.hint)
        }
    assert asked.taken() == [], "no process of ssh, and none for each host"
