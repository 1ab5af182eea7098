"""Other methods to copy an image to hosts, for comparison in `bench_ship.py`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CIPHER = "aes128-gcm@openssh.com"


@dataclass(frozen=True)
class Cluster:
    """The head's Docker, and OpenSSH's configuration for the hosts."""

    docker_host: str
    ssh_config: Path
    hosts: Sequence[str]

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.docker_host}

    def ssh(self, host: str, *argv: str, options: Sequence[str] = ()) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config), "-c", CIPHER, *options, host, *argv]

    def everywhere(self, *argv: str) -> None:
        """Run one command on all hosts at once; discard its output."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for process in [subprocess.Popen(self.ssh(host, *argv), **quiet) for host in self.hosts]:
            process.wait()


def plain_copy(cluster: Cluster, host: str, file: Path) -> float:
    """Return seconds to copy a file to one host with ssh and cat."""
    began = time.monotonic()
    with file.open("rb") as content:
        subprocess.run(cluster.ssh(host, "cat > /tmp/plain-copy"), stdin=content, check=True)
    took = time.monotonic() - began
    subprocess.run(cluster.ssh(host, "rm", "/tmp/plain-copy"), check=True)
    return took


def save_load(cluster: Cluster, image: str) -> float:
    """Return seconds of ``docker save | ssh HOST docker load`` for all hosts at once."""
    began = time.monotonic()
    pairs = []
    for host in cluster.hosts:
        save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, env=cluster.environ)
        load = subprocess.Popen(cluster.ssh(host, "docker", "load"), stdin=save.stdout, stdout=subprocess.DEVNULL)
        assert save.stdout
        save.stdout.close()
        pairs.append((save, load))
    for save, load in pairs:
        assert load.wait() == 0 and save.wait() == 0
    return time.monotonic() - began


class NoRegistry(Exception):
    """Debian's docker-registry cannot be downloaded here."""


def registry_program() -> Path:
    """Return Debian's docker-registry, unpacked into the cache, not installed.

    Raises:
        NoRegistry: it cannot be downloaded.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpurun" / "registry"
    program = folder / "usr/bin/docker-registry"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["apt-get", "download", "-qq", "docker-registry"], cwd=folder, check=True, capture_output=True
            )
            (package,) = folder.glob("docker-registry_*.deb")
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise NoRegistry(str(error)) from None
    return program


@contextmanager
def registry() -> Iterator[int]:
    """Run a registry on the head. Yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = Path(tempfile.mkdtemp(prefix="gpurun-registry-"))
    config = data / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {data}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process = subprocess.Popen(
        [registry_program(), "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(data)


def head_docker(cluster: Cluster, *argv: str) -> None:
    subprocess.run(["docker", *argv], env=cluster.environ, stdout=subprocess.DEVNULL, check=True)


def push_pull(cluster: Cluster, image: str) -> float:
    """Return seconds of ``docker push`` to a head registry and ``docker pull`` on all hosts through ``ssh -R``."""
    with registry() as port:
        name = f"127.0.0.1:{port}/{image}"
        head_docker(cluster, "tag", image, name)
        began = time.monotonic()
        head_docker(cluster, "push", "-q", name)
        tunnel = ["-R", f"{port}:127.0.0.1:{port}"]
        pulls = [
            subprocess.Popen(cluster.ssh(host, "docker", "pull", "-q", name, options=tunnel), stdout=subprocess.DEVNULL)
            for host in cluster.hosts
        ]
        assert all(pull.wait() == 0 for pull in pulls)
        took = time.monotonic() - began
        cluster.everywhere("docker", "rmi", "-f", name)
        head_docker(cluster, "rmi", name)
        return took
