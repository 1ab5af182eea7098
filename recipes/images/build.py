#!/usr/bin/env python3
"""Build the images that gpurun's recipes and tests use, from Debian packages and PyPI only.

    python recipes/images/build.py [shell] [tiny] [base] [tf2.15] [torch] [jax]        (all of them if none is named)

Nothing is built twice: each image carries a label with the hash of what it was made from, and packages, layers
and Horovod's wheel are kept in ~/.cache/gpurun. Docker needs no network of its own. The engine is DOCKER_HOST, else
the one that `gpurun lab engine` names.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import rootfs
import wheelhouse

HERE = Path(__file__).resolve().parent
BASE = HERE / "base"
FRAMEWORK = {"tf2.15": "tensorflow", "torch": "torch", "jax": "jax"}  # images with a framework
WITH_HOROVOD = ("tf2.15", "torch")  # those with Horovod, built against it
ADDITIONS = ("openmpi", "data", "binutils", "compilers")  # each on top of those before it
IMAGE = {
    "tf2.15": "gpurun/train:tf2.15", "torch": "gpurun/train:torch", "jax": "gpurun/train:jax",
    "base": "gpurun/base:bookworm", "shell": "gpurun/shell:1", "tiny": "gpurun/tiny:1",
}  # fmt: skip
IMAGES = tuple(IMAGE)
TRAINED_IN = ("openmpi", "data", "binutils")  # the additions that training images are built with
INPUTS = "gpurun.inputs"  # label: hash of what an image was made from
LAYERS = "gpurun.layers"  # label: which bootstrap it comes from; layers of two are not to be mixed
STAGE = "gpurun.stage"  # label of what is only needed while building


@dataclass(frozen=True)
class Engine:
    """A Docker engine, through its command line."""

    host: str

    def run(self, *argv: str) -> None:
        """Run ``docker ARGV``; its output goes to stderr.

        Raises:
            subprocess.CalledProcessError: it failed, and has said why.
        """
        subprocess.run(["docker", *argv], check=True, env=self._environment, stdout=sys.stderr)

    def ask(self, *argv: str) -> str:
        """Output of ``docker ARGV``; empty if it fails."""
        return subprocess.run(
            ["docker", *argv], env=self._environment, capture_output=True, text=True, check=False
        ).stdout.strip()

    def replace(self, image: str, *argv: str) -> None:
        """Run ``docker ARGV``, which makes `image` anew; then remove what it replaced, unless that is in use.

        Build stages go, too. Nothing is lost: built again from the same packages, layers come out the same.
        """
        before = self.ask("image", "inspect", "--format", "{{.Id}}", image)
        self.run(*argv)
        if before and before != self.ask("image", "inspect", "--format", "{{.Id}}", image):
            self.ask("image", "rm", before)
        self.ask("image", "prune", "--force", "--filter", f"label={STAGE}")

    def label(self, image: str, name: str) -> str:
        """A label of an image; empty if there is no such label or image."""
        return self.ask("image", "inspect", "--format", f'{{{{index .Config.Labels "{name}"}}}}', image)

    @property
    def _environment(self) -> dict[str, str]:
        # The classic builder: the one that every packaged engine and client has.
        return {**os.environ, "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "0"}


@dataclass(frozen=True)
class Cache:
    """Where packages, layers and wheels are kept between builds."""

    folder: Path

    @property
    def wheels(self) -> Path:
        """Downloaded wheels, and Horovod's own."""
        return self.folder / "wheels"

    @property
    def bootstrap(self) -> str:
        """Which bootstrap the layers here come from; empty if one is missing, and all are to be made anew."""
        folder = self._debian
        tars = (f"{tar}.tar" for tar in ("base", "shell", "tiny", *ADDITIONS))
        return (folder / "id").read_text() if all((folder / name).is_file() for name in ("id", *tars)) else ""

    @property
    def _debian(self) -> Path:
        return self.folder / "images" / f"debian-{debian_inputs()}"

    def layers(self) -> Path:
        """The folder with the tars of base, shell and tiny and of each addition; all made anew if one is missing."""
        folder = self._debian
        if self.bootstrap:
            return folder
        say("Debian packages: root file system and layers")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="debian-", dir=folder.parent) as scratch:
            lists = {name: rootfs.package_list(BASE / f"debian-{name}.txt") for name in ADDITIONS}
            rootfs.build(rootfs.package_list(BASE / "debian.txt"), lists, Path(scratch))
            (Path(scratch) / "id").write_text(uuid.uuid4().hex)
            for older in folder.parent.glob("debian-????????????????"):
                shutil.rmtree(older)
            Path(scratch).rename(folder)
            Path(scratch).mkdir()  # for TemporaryDirectory to remove
        return folder


def debian_inputs() -> str:
    """Hash of what the Debian layers are made from."""
    lists = [BASE / "debian.txt", *(BASE / f"debian-{name}.txt" for name in ADDITIONS)]
    return wheelhouse.digest(HERE / "rootfs.py", *lists)


def wheel_inputs(name: str) -> str:
    """Hash of what Horovod's wheel for an image depends on."""
    mine = ("Dockerfile.wheel", "horovod-source.txt", f"{FRAMEWORK[name]}.txt")
    shared = ("debian-openmpi.txt", "debian-compilers.txt")
    return wheelhouse.digest(*(HERE / name / file for file in mine), *(BASE / file for file in shared))


def inputs_of(name: str) -> str:
    """Hash of everything the image is made from."""
    if name == "tiny":
        return debian_inputs() + wheelhouse.digest(HERE / "tiny" / "ring.py")
    if name not in FRAMEWORK:
        return debian_inputs()
    packages = "horovod.txt" if name in WITH_HOROVOD else f"{FRAMEWORK[name]}.txt"
    mine = (HERE / name / "Dockerfile", HERE / name / packages)
    shared = ("install.py", "openmpi-mca-params.conf", "build.txt")
    found = wheelhouse.digest(*mine, *(BASE / file for file in shared)) + debian_inputs()
    return found + wheel_inputs(name) if name in WITH_HOROVOD else found


def import_root(name: str, engine: Engine, layers: Path) -> None:
    """Import one of the root file systems, ``base``, ``shell`` or ``tiny``, as an image of one layer."""
    bootstrap = (layers / "id").read_text()
    with tempfile.TemporaryDirectory(prefix="import-", dir=layers.parent) as scratch:
        tar = layers / f"{name}.tar"
        if name == "tiny":
            tar = with_program(tar, HERE / "tiny" / "ring.py", Path(scratch))
        say(f"{IMAGE[name]}: importing {tar.stat().st_size / 1e6:.0f} MB")
        labels = f"LABEL {INPUTS}={inputs_of(name)} {LAYERS}={bootstrap}"
        commands = ("--change", labels, "--change", 'CMD ["/bin/sh"]')
        engine.replace(IMAGE[name], "import", *commands, str(tar), IMAGE[name])


def with_program(tar: Path, program: Path, scratch: Path) -> Path:
    """A copy of a root file system that also has the program, in ``/usr/bin`` and without its suffix."""
    copy = Path(shutil.copy(tar, scratch))
    with tarfile.open(copy, "a") as archive:
        member = archive.gettarinfo(program, f"usr/bin/{program.stem}")
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o755
        with program.open("rb") as file:
            archive.addfile(member, file)
    return copy


def is_up_to_date(name: str, engine: Engine, cache: Cache) -> bool:
    """Is the image made from today's inputs, and from the same bootstrap as images that are built from now on?

    Hosts keep a layer once only if all images share it. Without layers in the cache, today's inputs suffice.
    """
    if engine.label(IMAGE[name], INPUTS) != inputs_of(name):
        return False
    return not cache.bootstrap or engine.label(IMAGE[name], LAYERS) == cache.bootstrap


def base_image(engine: Engine, cache: Cache) -> Path:
    """The folder of layers, once the engine has the image of the lowest one."""
    layers = cache.layers()
    if not is_up_to_date("base", engine, cache):
        import_root("base", engine, layers)
    return layers


def build_train(name: str, engine: Engine, cache: Cache) -> None:
    """Build a training image, and first Horovod's wheel for its framework if it has Horovod and the cache none."""
    groups = (FRAMEWORK[name], "horovod") if name in WITH_HOROVOD else (FRAMEWORK[name],)
    built = [horovod_wheel(name, engine, cache)] if name in WITH_HOROVOD else []
    say(f"wheels of {' and '.join(groups)}")
    wheels = {group: sorted(wheelhouse.fetch(HERE / name / f"{group}.txt", cache.wheels).iterdir()) for group in groups}
    wheels[groups[-1]].extend(built)
    build_image(name, wheels, engine, cache)


def build_image(name: str, wheels: Mapping[str, Sequence[Path]], engine: Engine, cache: Cache) -> None:
    """Build a training image from its Dockerfile, the Debian layers, and each group of wheels."""
    layers = base_image(engine, cache)
    tools = wheelhouse.fetch(BASE / "build.txt", cache.wheels)
    with build_context(cache) as context:
        for addition in TRAINED_IN:
            place(layers / f"{addition}.tar", context)
        for file in (HERE / name / "Dockerfile", BASE / "install.py", BASE / "openmpi-mca-params.conf"):
            place(file, context)
        for group, files in wheels.items():
            for file in (*files, *tools.glob("pip-*.whl")):
                place(file, context / "wheels" / group)
        say(IMAGE[name])
        options = ("--network", "none", "--label", f"{INPUTS}={inputs_of(name)}", "--tag", IMAGE[name])
        engine.replace(IMAGE[name], "build", *options, str(context))


def horovod_wheel(name: str, engine: Engine, cache: Cache) -> Path:
    """Horovod's wheel from the cache, else built in a container of the image's own lower layers."""
    folder = cache.wheels / f"horovod-built-{wheel_inputs(name)}"
    if not folder.is_dir():
        layers = base_image(engine, cache)
        say("wheels to build Horovod with")
        source = HERE / name
        lists = (source / f"{FRAMEWORK[name]}.txt", source / "horovod.txt", BASE / "build.txt")
        folders = [wheelhouse.fetch(each, cache.wheels) for each in lists]
        folders.append(wheelhouse.fetch(source / "horovod-source.txt", cache.wheels, wheelhouse.SOURCE_ONLY))
        with build_context(cache) as context:
            for addition in ADDITIONS:
                place(layers / f"{addition}.tar", context)
            place(source / "Dockerfile.wheel", context)
            for file in (file for fetched in folders for file in fetched.iterdir()):
                place(file, context / "wheels", "pip.whl" if file.name.startswith("pip-") else file.name)
            say("Horovod: compiling, some minutes on two cores")
            compile_wheel(engine, context, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def compile_wheel(engine: Engine, context: Path, folder: Path) -> None:
    """Build ``Dockerfile.wheel`` and move the wheel it made to `folder`; leaves no image or container behind."""
    image = "gpurun/horovod-wheel:build"
    file = str(context / "Dockerfile.wheel")
    container = ""
    try:
        engine.run("build", "--network", "none", "--force-rm", "--file", file, "--tag", image, str(context))
        container = engine.ask("create", image, "true")
        engine.run("cp", f"{container}:/out", str(context / "out"))
        (context / "out").rename(folder)
    finally:
        if container:
            engine.ask("rm", container)
        engine.ask("image", "rm", image)


@contextmanager
def build_context(cache: Cache) -> Iterator[Path]:
    """An empty folder beside the cached files, so that they can be linked into it."""
    with tempfile.TemporaryDirectory(prefix="context-", dir=cache.folder) as folder:
        yield Path(folder)


def place(file: Path, folder: Path, name: str | None = None) -> None:
    """Put a file into a build context without copying it where links can reach."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (name or file.name)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def engine_host() -> str:
    """DOCKER_HOST, else what the lab says."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    argv = [sys.executable, "-m", "gpurun.cli.lab", "engine"]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def say(text: str) -> None:
    """One line of progress, with the time since the start."""
    SAID.append(text)
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def say_each_minute() -> None:
    """Repeat the last line of progress each minute: downloads and compilers are silent for minutes."""
    while True:
        before = len(SAID)
        time.sleep(60)
        if SAID and len(SAID) == before:
            print(f"[{time.monotonic() - STARTED:6.1f} s] still: {SAID[-1]}", file=sys.stderr, flush=True)


STARTED = time.monotonic()
SAID: list[str] = []


def main() -> None:
    """Build what the command line names, one process at a time."""
    parser = argparse.ArgumentParser(description="Build gpurun's images from Debian packages and PyPI.")
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", choices=[*IMAGES, []], help=", ".join(IMAGES) + "; all if none is named"
    )
    images = parser.parse_args().images or IMAGES
    cache = Cache(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpurun")
    cache.folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(engine_host())
    with (cache.folder / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(is_up_to_date(name, engine, cache) for name in images):
            cache.layers()  # a new bootstrap, if one is needed, before the first image is looked at
        for name in images:
            if is_up_to_date(name, engine, cache):
                say(f"{IMAGE[name]} is up to date")
            elif name in FRAMEWORK:
                build_train(name, engine, cache)
            else:
                import_root(name, engine, cache.layers())


if __name__ == "__main__":
    threading.Thread(target=say_each_minute, daemon=True).start()
    main()
