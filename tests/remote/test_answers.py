"""`ssh -G` is asked once for each host, until something changes that decides its answer."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from gpurun.remote import Target, answers, openssh
from gpurun.remote.ssh_config import resolve, resolve_all
from gpurun.state import own_cache

SSH = [f"{folder}/ssh" for folder in os.environ["PATH"].split(":")]


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

    def counted(question):
        with calls.lock:
            calls.hosts.append(question.name)
            calls.at_once += 1
            calls.most_at_once = max(calls.most_at_once, calls.at_once)
        try:
            return ask(question)
        finally:
            with calls.lock:
                calls.at_once -= 1

    monkeypatch.setattr(openssh, "_ask", counted)
    return calls


def settle():
    """Until a change of a file that was just written shows."""
    time.sleep(own_cache.SETTLED_NS / 1e9 + 0.05)


def another_process():
    answers._in_memory.clear()


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "a'; ü #"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "conf.d" / "1.conf").write_text("Host gpu1\n User inner\n")
    path = folder / "config"
    path.write_text(f'Include "{folder}/conf.d/*.conf"\nUserKnownHostsFile ${{KNOWN}}\nUser outer\nProxyCommand true\n')
    os.environ["KNOWN"] = "/k"
    settle()
    yield path
    del os.environ["KNOWN"]


def user(config, host="gpu1") -> str:
    return resolve(Target(host, ssh_config=str(config))).user


def test_resolving_many_hosts_starts_one_process_for_each_and_none_later(tmp_path, asked):
    config = tmp_path / "config"
    config.write_text("Host gpu*\n ProxyJump j1,j2\nHost *\n Port 2222\n")
    settle()
    targets = [Target(f"gpu{number}", ssh_config=str(config)) for number in range(100)]
    for restart in (False, False, True):
        if restart:
            another_process()
        for _ in range(10):
            routes = resolve_all(targets)
        assert len(routes) == 100
        assert {route.jump.jump.port for route in routes.values()} == {2222}
    assert asked.taken() == sorted(["j1", "j2", *(target.name for target in targets)])
    assert 1 < asked.most_at_once <= openssh.PROCESSES_AT_ONCE
    (kept,) = (tmp_path / "cache" / "gpurun" / "ssh").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_hosts_that_come_later_add_to_what_is_kept(config, asked):
    for host in ("gpu1", "gpu2", "gpu1", "gpu2"):
        user(config, host)
        another_process()
    assert asked.taken() == ["gpu1", "gpu2"]


def test_another_address_port_or_user_is_another_question(config, asked):
    for _ in range(2):
        for given in ({}, {"address": "10.0.0.1"}, {"port": 9}, {"user": "u"}):
            resolve(Target("gpu1", ssh_config=str(config), **given))
    assert asked.taken() == ["gpu1"] * 4


def edit(config, monkeypatch):
    config.write_text(config.read_text().replace("outer", "newer"))


def replace_by_an_old_file(config, monkeypatch):
    old = config.with_name("old")
    old.write_text("User newer\n")
    os.utime(old, ns=(0, config.stat().st_mtime_ns))
    old.rename(config)


def lead_a_link_elsewhere(config, monkeypatch):
    replace_by_an_old_file(config, monkeypatch)
    config.rename(config.with_name("real"))
    config.symlink_to("real")


def add_a_file(config, monkeypatch):
    (config.parent / "conf.d" / "0.conf").write_text("Host gpu2\n User newer\n")


def remove_a_file(config, monkeypatch):
    (config.parent / "conf.d" / "1.conf").unlink()


def change_a_variable(config, monkeypatch):
    monkeypatch.setenv("KNOWN", "/other")


def change_home(config, monkeypatch):
    monkeypatch.setenv("HOME", "/other")


def rename_the_machine(config, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "other")


def install_another_ssh(config, monkeypatch):
    folder = config.parent / "bin"
    folder.mkdir()
    (folder / "ssh").symlink_to(next(path for path in map(Path, SSH) if path.exists()))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def install_another_gpurun(config, monkeypatch):
    monkeypatch.setattr(own_cache, "code_stamp", lambda *_: "newer")


CHANGES = [
    edit,
    replace_by_an_old_file,
    lead_a_link_elsewhere,
    add_a_file,
    remove_a_file,
    change_a_variable,
    change_home,
    rename_the_machine,
    install_another_ssh,
    install_another_gpurun,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("restart", [False, True])
def test_ssh_is_asked_again_after_a_change(config, asked, change, restart, monkeypatch):
    before = user(config, "gpu2")
    assert (before, asked.taken()) == ("outer", ["gpu2"])
    change(config, monkeypatch)
    if restart or change is install_another_gpurun:
        another_process()
    found = resolve(Target("gpu2", ssh_config=str(config)))
    assert asked.taken() == ["gpu2"]
    assert found.user == ("newer" if change in CHANGES[:4] else "outer")
    if change is change_a_variable:
        assert found.known_hosts[0] == "/other"
    settle()
    for _ in range(3):
        user(config, "gpu2")
    assert len(asked.taken()) <= 1


def test_a_file_that_was_just_written_is_read_again(config, asked):
    for number in range(5):
        config.write_text(f"User u{number}\n")
        assert user(config) == f"u{number}"
    assert asked.taken() == ["gpu1"] * 5


@pytest.mark.parametrize(
    "text",
    [
        'Match exec "true"\n User u\n',
        "CanonicalizeHostname yes\nCanonicalDomains example.invalid\n",
        "CanonicalizePermittedCNAMEs *.invalid:*.invalid\n",
        "User u # " + "x" * 1000 + "\n",
        'Include "DIR/new\nline/*.conf"\n',
        "Include DIR/pi%h*\n",
    ],
)
def test_what_files_alone_do_not_decide_is_asked_every_time(tmp_path, asked, text, monkeypatch):
    monkeypatch.setattr(answers, "MAX_FILE_BYTES", 1000)
    odd = tmp_path / "new\nline"
    odd.mkdir()
    (odd / "a.conf").write_text("Port 7\n")
    config = tmp_path / "config"
    config.write_text(text.replace("new\nline", "new?line").replace("DIR", str(tmp_path)))
    settle()
    for _ in range(3):
        user(config, "localhost")
    assert asked.taken() == ["localhost"] * 3


def test_hosts_that_no_command_is_run_for_are_kept(tmp_path, asked):
    config = tmp_path / "config"
    config.write_text('Match originalhost gpu2 exec "true"\n User u\n')
    settle()
    for _ in range(3):
        resolve_all([Target(f"gpu{number}", ssh_config=str(config)) for number in (1, 2, 3)])
    assert asked.taken() == ["gpu1", "gpu2", "gpu2", "gpu2", "gpu3"]


def forge(kept: Path, config: Path) -> None:
    """What a hostile program with write access to the cache folder can do best: a sound file but for the key."""
    entry = msgspec.msgpack.decode(kept.read_bytes()[32:])
    entry["texts"] = {key: text + b"\nproxycommand touch /tmp/forged" for key, text in entry["texts"].items()}
    payload = msgspec.msgpack.encode(entry).replace(b"proxycommand true", b"proxycommand evil")
    kept.write_bytes(hashlib.sha256(payload).digest() + payload)


def swap(kept: Path, config: Path) -> None:
    other = config.with_name("other")
    other.write_text("ProxyCommand evil\n")
    settle()
    resolve(Target("gpu1", ssh_config=str(other)))
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
    before = resolve(Target("gpu1", ssh_config=str(config)))
    (kept,) = Path(os.environ["XDG_CACHE_HOME"], "gpurun/ssh").iterdir()
    trick(kept, config)
    another_process()
    asked.taken()
    found = resolve(Target("gpu1", ssh_config=str(config)))
    assert found == before and found.proxy_command == "true"
    assert asked.taken() == ["gpu1"]


@pytest.mark.parametrize("place", ["/proc/nowhere", "relative", ""])
def test_without_a_place_for_caches_memory_is_enough(config, asked, place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    for _ in range(3):
        user(config)
    assert asked.taken() == ["gpu1"]
