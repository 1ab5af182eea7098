"""Images for tests of shipping: made byte by byte, loaded into the head's Docker, removed again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpurun.lab import Lab

MIB = 1 << 20
NAMES = f"ship-{os.getpid()}"
"""The prefix of this process's image names: other checkouts' tests may use the same engine."""


def layer(seed: str, size: int = 0, **files: bytes) -> bytes:
    """Return a layer's tar: a file of `size` pseudo-random bytes from `seed`, and other files."""
    content = {f"{seed}.bin": noise(seed, size), **files}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, 1_000_000_000
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def noise(seed: str, size: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return hashlib.shake_256(seed.encode()).digest(size)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class Made:
    """An image on the head."""

    name: str
    id: str
    layers: tuple[str, ...]
    bytes: int


class Head:
    """The head's Docker."""

    def __init__(self, docker_host: str) -> None:
        self.docker_host = docker_host
        self.made: list[str] = []

    def make(self, name: str, layers: Sequence[bytes], **config: Any) -> Made:
        """An image of these layers, loaded."""
        digests = [digest_of(each) for each in layers]
        document = {
            "architecture": "amd64", "os": "linux", "created": "2026-01-01T00:00:00Z",
            "config": {"Cmd": ["/true"], **config},
            "rootfs": {"type": "layers", "diff_ids": digests},
        }  # fmt: skip
        raw = json.dumps(document).encode()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:

            def add(path: str, content: bytes) -> None:
                info = tarfile.TarInfo(path)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

            hexes = [digest.removeprefix("sha256:") for digest in digests]
            for at, content in dict(zip(hexes, layers, strict=True)).items():
                add(f"{at}/layer.tar", content)
            add("config.json", raw)
            manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": [f"{at}/layer.tar" for at in hexes]}]
            add("manifest.json", json.dumps(manifest).encode())
        self.docker("load", stdin=out.getvalue())
        self.made.append(name)
        return Made(name, digest_of(raw), tuple(digests), sum(len(each) for each in layers))

    def docker(self, *argv: str, stdin: bytes = b"") -> bytes:
        done = subprocess.run(["docker", *argv], input=stdin, capture_output=True, env=self._environ(), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        for name in self.made:
            subprocess.run(["docker", "rmi", "-f", name], capture_output=True, env=self._environ(), check=False)

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.docker_host}


class OnHost:
    """A lab host's Docker."""

    def __init__(self, lab: Lab, host: str) -> None:
        self._lab, self._host = lab, host

    def docker(self, *argv: str, stdin: bytes = b"") -> bytes:
        done = self._lab.run(self._host, ["docker", *argv], stdin=stdin)
        assert done.code == 0, done.stderr
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any] | None:
        done = self._lab.run(self._host, ["docker", "image", "inspect", name])
        return json.loads(done.stdout)[0] if done.code == 0 else None

    def images(self) -> set[str]:
        """Return the IDs of all images there, including intermediate images."""
        out = self.docker("images", "-aq", "--no-trunc").decode()
        return set(out.split())

    def forget(self, *names: str) -> None:
        for name in names:
            self._lab.run(self._host, ["docker", "rmi", "-f", name])

    def saved_layers(self, name: str) -> list[str]:
        """Return the digest of each layer that ``docker save`` writes there."""
        with tarfile.open(fileobj=io.BytesIO(self.docker("save", name))) as archive:
            files = {entry.name: entry for entry in archive}
            read = archive.extractfile(files["manifest.json"])
            assert read is not None
            (manifest,) = json.load(read)
            digests = []
            for path in manifest["Layers"]:
                entry = files[path]
                if entry.issym():  # Docker writes a layer that comes twice once
                    entry = files[os.path.normpath(f"{path}/../{entry.linkname}")]
                content = archive.extractfile(entry)
                assert content is not None
                digests.append(digest_of(content.read()))
        return digests

    def spool(self) -> list[str]:
        """Return the files that transfers left on the host."""
        done = self._lab.run(self._host, ["find", "/home", "/root", "-path", "*/gpurun/spool/*", "-type", "f"])
        return done.stdout.decode().split()
