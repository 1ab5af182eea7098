"""A real sshd of the test's own, as an ordinary process on a high port of the loopback interface."""

from __future__ import annotations

import getpass
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from own_sshd import own_sshd
from waiting import LIMIT_S, until

from gpurun.remote import Fleet, Target

PORTS = (10_000, 20_000)
"""Below those that Linux gives to connections (net.ipv4.ip_local_port_range), and to gpurun's jobs."""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine opens sessions slowly, and answers late. Tests of hosts that fall silent say for how long."""
    for name in ("timeout_s", "dead_after_s"):
        monkeypatch.setitem(Fleet.open.__func__.__kwdefaults__, name, LIMIT_S)


@pytest.fixture(autouse=True)
def own_cache_of_answers(tmp_path, monkeypatch):
    """What `ssh -G` answers is kept nowhere else, and not from test to test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own config"))


def keygen(path: Path, kind: str = "ed25519") -> Path:
    """A new key pair; the private key's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    size = ["-b", "2048"] if kind == "rsa" else []  # larger ones take seconds
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *size, "-N", "", "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    """``TYPE BASE64`` of a key pair."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


@dataclass
class Sshd:
    """One sshd: where it listens, its keys, its process."""

    folder: Path
    port: int
    host_keys: list[Path]
    process: subprocess.Popen[bytes] | None = None
    bin_folders: list[str] = field(default_factory=list)

    def start(self, *lines: str) -> None:
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                [
                    *lines,  # first: sshd takes the first value it reads
                    f"Port {self.port}",
                    "ListenAddress 127.0.0.1",
                    *(f"HostKey {key}" for key in self.host_keys),
                    f"AuthorizedKeysFile {self.folder}/authorized_keys",
                    f"PidFile {self.folder}/sshd.pid",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "PermitRootLogin yes",
                    *([] if "MaxStartups" in " ".join(lines) else ["MaxStartups 200"]),  # of these it takes the last
                    "MaxSessions 200",
                    "LogLevel ERROR",
                ]
            )
            + "\n"
        )
        self.process = subprocess.Popen([own_sshd(), "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, "the test's sshd does not start"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(LIMIT_S)
            self.process = None


def free_port() -> int:
    """A port that no connection of this machine gets as its own before the sshd has it."""
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", random.randrange(*PORTS)))
            return int(sock.getsockname()[1])


@dataclass
class Net:
    """A user's side of things: an ssh_config, a key, a known_hosts, and sshds to reach."""

    folder: Path
    key: Path
    known_hosts: Path
    ssh_config: Path
    sshds: list[Sshd]
    ssh: str | None = None

    def new_key(self, name: str, kind: str = "ed25519") -> Path:
        """Another key pair."""
        return keygen(self.folder / name, kind)

    public = staticmethod(public)

    def sshd(self, *lines: str, keys: tuple[str, ...] = ("ed25519",), start: bool = True) -> Sshd:
        """Another sshd, already known and open to the user's key."""
        folder = self.folder / f"sshd{len(self.sshds)}"
        folder.mkdir()
        server = Sshd(folder, free_port(), [keygen(folder / f"host_{kind}", kind) for kind in keys])
        (folder / "authorized_keys").write_text(public(self.key) + "\n")
        with self.known_hosts.open("a") as known:
            for key in server.host_keys:
                known.write(f"[127.0.0.1]:{server.port} {public(key)}\n")
        self.sshds.append(server)
        if start:
            server.start(*lines)
        return server

    def host(self, name: str, server: Sshd, *lines: str) -> Target:
        """A target whose way to the sshd stands in the ssh_config."""
        with self.ssh_config.open("a") as config:
            text = "\n  ".join([f"Host {name}", "HostName 127.0.0.1", f"Port {server.port}", *lines])
            config.write(text + "\n")
        return Target(name, ssh_config=str(self.ssh_config), ssh=self.ssh)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    folder = tmp_path / "net"
    folder.mkdir()
    key = keygen(folder / "id_ed25519")
    config = folder / "ssh_config"
    known = folder / "known_hosts"
    known.touch()
    config.write_text(
        f"IdentityFile {key}\nIdentitiesOnly yes\nUser {getpass.getuser()}\n"
        f"UserKnownHostsFile {known}\nGlobalKnownHostsFile none\n"
    )
    made = Net(folder, key, known, config, [])
    yield made
    for server in made.sshds:
        server.stop()


@pytest.fixture
def python_bin(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a stand-in `python3` of the given content."""

    def make(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "python3"
        program.write_text(script)
        program.chmod(0o755)
        return folder

    return make


assert sys.platform == "linux"
