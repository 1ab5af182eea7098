"""Debian packages as image layers: a bookworm root file system, then what each package list adds to it.

Needs root, apt, mmdebstrap and GNU tar on a Debian or Ubuntu machine; nothing of the machine itself gets into
the layers. Packages come from the mirror that the machine's own apt uses when the machine is a Debian, else from
mmdebstrap's default, always checked against the Debian archive's keys.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SUITE = "bookworm"
PYTHON = (
    "python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib",
    "libc6", "libexpat1", "libffi8", "libssl3", "zlib1g",
)  # fmt: skip
"""What Python, `_ctypes`, `ssl` and `zlib` need. The first name is also the program's."""
# Documentation and translations: nothing in a training container reads them.
WITHOUT = ("usr/share/doc/*", "usr/share/man/*", "usr/share/info/*", "usr/share/locale/*", "usr/share/lintian/*")
# Never part of a layer: what apt downloaded, logs, kernel file systems, and the host's own apt settings.
UNTRACKED = (
    "dev", "proc", "sys", "run", "tmp", "var/tmp", "var/cache/apt", "var/cache/debconf", "var/cache/ldconfig",
    "var/lib/apt/lists", "var/log", "etc/apt/apt.conf.d/99mmdebstrap", "etc/resolv.conf", "etc/hostname",
)  # fmt: skip
APT_SETTINGS = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")


def package_list(file: Path) -> tuple[str, ...]:
    """Names in a list file: one a line, ``#`` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return tuple(line for line in lines if line)


def build(base: Sequence[str], additions: Mapping[str, Sequence[str]], into: Path) -> None:
    """Write ``base.tar``, ``shell.tar``, ``tiny.tar`` and one ``NAME.tar`` per addition into the folder `into`.

    Args:
        base: packages of the root file system, beside Debian's essential ones and apt.
        additions: name → packages. Each tar holds what installing its packages changed, on top of all before it.

    Raises:
        subprocess.CalledProcessError: a tool failed; its message is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="gpurun-rootfs-", dir=into) as scratch:
        tree = Path(scratch) / "tree"
        _bootstrap(tree, base)
        _archive(tree, into / "base.tar", _changed_since(tree, 0))
        environment = _apt_environment(tree, Path(scratch))
        _run("apt-get", "update", env=environment)
        _shell(Path(scratch) / "small", into / "shell.tar", environment)
        _tiny(Path(scratch) / "small", into / "tiny.tar", environment)
        for name, packages in additions.items():
            start_ns = _clock_of(tree)
            _run("apt-get", "--yes", "--no-install-recommends", "install", *packages, env=environment)
            _archive(tree, into / f"{name}.tar", _changed_since(tree, start_ns))


def sources(release: Mapping[str, str], targets: Iterable[str]) -> tuple[str, ...]:
    """Lines of a ``sources.list`` for bookworm from the machine's own; none if it is not a Debian.

    Args:
        release: the machine's ``/etc/os-release``.
        targets: lines ``URI|RELEASE|COMPONENT``, as ``apt-get indextargets`` prints them.
    """
    if release.get("ID") != "debian":
        return ()
    codename = release.get("VERSION_CODENAME", "")
    found = []
    for target in targets:
        uri, name, component = target.strip().split("|")
        for pocket in ("", "-updates", "-security"):
            if component == "main" and name == codename + pocket:
                found.append(f"deb {uri} {SUITE}{pocket} main")
    return tuple(dict.fromkeys(found))


def apt_settings(dump: Iterable[str]) -> tuple[str, ...]:
    """Of ``apt-config dump``, the machine's settings for reaching mirrors: proxies, certificates, retries."""
    wanted = (line.strip() for line in dump if line.startswith(APT_SETTINGS))
    return tuple(line for line in wanted if not line.endswith('"";'))


def _bootstrap(tree: Path, packages: Sequence[str]) -> None:
    lists = sources(_os_release(), _output("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)",
                                           "Created-By: Packages"))  # fmt: skip
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--include=" + ",".join(packages)]
    argv += [f"--dpkgopt=path-exclude=/{path}" for path in WITHOUT]
    argv += [f"--aptopt={line}" for line in apt_settings(_output("apt-config", "dump"))]
    _run(*argv, SUITE, str(tree), *lists)


def _apt_environment(tree: Path, scratch: Path) -> dict[str, str]:
    """The environment in which the machine's apt works on the tree, and dpkg runs inside it."""
    settings = scratch / "apt.conf"
    settings.write_text(f'Dir "{tree}";\nDPkg::Chroot-Directory "{tree}";\nAPT::Sandbox::User "root";\n')
    return {**os.environ, "APT_CONFIG": str(settings), "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}


def _shell(folder: Path, tar: Path, environment: Mapping[str, str]) -> None:
    """The smallest image that has a shell and the usual tools: Debian's static busybox and its links."""
    for part in ("bin", "etc", "proc", "sys", "dev", "run", "var", "root", "usr/bin", "tmp"):
        (folder / part).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    with _extracted(folder.parent / "busybox", ("busybox-static",), environment) as extracted:
        # /bin in bookworm, /usr/bin since the merge of the two.
        (program,) = (path for path in extracted.rglob("bin/busybox") if path.is_file())
        shutil.move(program, folder / "bin" / "busybox")
    for applet in _output(str(folder / "bin" / "busybox"), "--list"):
        for link in (folder / "bin" / applet.strip(), folder / "usr/bin" / applet.strip()):
            if not link.exists():
                link.symlink_to("/bin/busybox")
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")
    _archive(folder, tar, _changed_since(folder, 0))


def _tiny(folder: Path, tar: Path, environment: Mapping[str, str]) -> None:
    """Add Python and its standard library, with compiled modules, to the folder of `_shell`."""
    with _extracted(folder.parent / "python", PYTHON, environment) as extracted:
        for part in ("etc", "lib", "lib64", "usr"):
            shutil.copytree(extracted / part, folder / part, symlinks=True, dirs_exist_ok=True)
    (folder / "usr/bin/python3").symlink_to(PYTHON[0])
    shutil.rmtree(folder / "usr/share")
    _run("chroot", str(folder), "python3", "-m", "compileall", "-q", f"/usr/lib/{PYTHON[0]}")
    _archive(folder, tar, _changed_since(folder, 0))


@contextmanager
def _extracted(folder: Path, packages: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    """A folder with the files of Debian packages, without those that they depend on."""
    downloads = folder / "download"
    downloads.mkdir(parents=True)
    _run("apt-get", "download", *packages, env=environment, cwd=downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(folder))
    shutil.rmtree(downloads)
    yield folder
    shutil.rmtree(folder)


def _clock_of(tree: Path) -> int:
    """Now, as the tree's file system stamps it: coarser than the system's clock and behind it."""
    probe = tree / ".clock"
    probe.touch()
    now_ns = probe.lstat().st_ctime_ns
    probe.unlink()
    time.sleep(0.02)  # longer than a kernel tick: what comes next is later than this
    return now_ns


def _changed_since(tree: Path, start_ns: int) -> list[str]:
    """Paths relative to the tree whose inode changed after `start_ns`, and the folders they are in; sorted."""
    found = set()
    for folder, folders, files in os.walk(tree):
        here = Path(folder).relative_to(tree)
        inside = [here / name for name in (*folders, *files)]
        for path in inside:
            if (tree / path).lstat().st_ctime_ns > start_ns and (str(path) not in UNTRACKED or (tree / path).is_dir()):
                found |= {path, *path.parents}  # a folder's own time is part of the layer as well
        folders[:] = [name for name in folders if str(here / name) not in UNTRACKED]
    return sorted(str(path) for path in found - {Path()})


def _archive(tree: Path, tar: Path, paths: Sequence[str]) -> None:
    argv = ["tar", "--create", "--file", str(tar), "--directory", str(tree), "--numeric-owner", "--xattrs"]
    _run(*argv, "--no-recursion", "--null", "--files-from=-", input="".join(path + "\0" for path in paths))


def _os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key: value.strip('"') for key, _, value in pairs}


def _output(*argv: str) -> list[str]:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def _run(*argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, input: str | None = None) -> None:
    """Run quietly; what the tool said is shown only if it fails."""
    done = subprocess.run(
        argv, check=False, env=env, cwd=cwd, input=input, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        done.check_returncode()
