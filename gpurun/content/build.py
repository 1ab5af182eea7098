"""Build an environment on the head: run pip in a container of the base image, then add one layer to the base image.

A second request for the same environment finds it. Builds of one environment wait for each other. A build that fails,
or gets SIGINT, SIGTERM or SIGHUP, leaves nothing; the user's next request for an environment removes what a killed
build left.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import signal
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from gpurun.content import inside
from gpurun.content.environment import (
    BASE,
    LABEL,
    NAME,
    PACKAGES,
    WHEELS,
    EnvironmentPlan,
    PipSettings,
    plan_environment,
    requirements_of,
    secrets_of,
)
from gpurun.content.export import default_folder
from gpurun.content.images import Engine, HeadImage
from gpurun.content.inside import COMPILING, ENVIRONMENT, NO_PIP, NO_VENV, PLACE
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.jobs.spec import Environment
from gpurun.node.folder import below
from gpurun.quantities import count
from gpurun.state import locks

if TYPE_CHECKING:
    from types import FrameType


# Turn pip's error messages into the error that the user sees. Pure.


MOST_LINES, MOST_CHARS = 4, 300
ASKED, PASSWORD = (
    "docs/environments.md",
    "put the password into a netrc file, and write the file's path into the recipe: `python: {secret: FILE}`",
)
_FULL = ("No space left on device", "Disk quota exceeded")
_NETWORK = (
    "Retrying (Retry(", "NewConnectionError", "Connection refused", "Temporary failure in name resolution",
    "ReadTimeout", "ConnectTimeout", "SSLError", "CERTIFICATE_VERIFY_FAILED", "Connection broken", "ProxyError",
    "Network is unreachable",
)  # fmt: skip
_REFUSED = re.compile(r"[^\n]{0,200}\b40[13] (?:Client )?Error\b[^\n]{0,80}|\bUser for \S+:[^\n]{0,80}")
_NOT_FOUND = re.compile(r"No matching distribution found for (.+)")
_UNREAD = re.compile(r"((?:Invalid requirement|InvalidMarker|InvalidSpecifier|UndefinedEnvironmentName): .{0,200})")
_CONFLICT = ("ResolutionImpossible", "conflicting dependencies")
_HASHES = ("DO NOT MATCH THE HASHES", "Hashes are required in --require-hashes mode")
_BUILD = ("subprocess-exited-with-error", "Failed building wheel", "Failed to build", "metadata-generation-failed")


def failure_of(code: int, log: str, base: str, secrets: Iterable[str] = (), details: str = "") -> GpurunError:
    """Return the error for an exit code of `gpurun.content.inside` and its output.

    Args:
        base: the base image of the environment.
        secrets: texts that no message may show.
        details: pip's own log: only this log says which index refused to answer.
    """
    text = hidden(log, secrets)
    said = tail(text)
    if code == NO_PIP:
        return BadInput(
            f"neither the image {base} nor the head has pip",
            hint="install pip in the image or on the head: `python3 -m pip` must work",
        )
    if code == NO_VENV:
        return BadInput(f"the image {base} must have Python 3.8 or newer with the module venv: {said}")
    if _any(_FULL, text):
        return HostNotReady(
            "the head's disk is full: pip cannot install the packages",
            hint="`gpurun prune` frees space; "
            "`docker image prune --all --filter label=gpurun.environment` removes the packages of earlier jobs",
        )
    if code == 137:
        return HostNotReady(
            "the build was killed: the head ran out of memory, or somebody removed the container of the build"
        )
    refused = _REFUSED.search(hidden(details, secrets)) or _REFUSED.search(text)
    return _of_pip(text, said, base, refused[0].strip() if refused else "")


def _of_pip(text: str, said: str, base: str, refused: str) -> GpurunError:
    found = _NOT_FOUND.search(text)
    missing = found[1].strip()[:MOST_CHARS] if found else ""
    if not refused and _any(_NETWORK, text):
        line = next(line for line in text.splitlines() if _any(_NETWORK, line)).strip()
        return HostNotReady(
            f"pip cannot reach the package index: {line[:MOST_CHARS]}", hint=f"{ASKED} says which indexes pip uses"
        )
    unread = _UNREAD.search(text)
    kinds = (
        (refused, f"the package index wants a password, or refused the password: {refused}", PASSWORD),
        (_any(_CONFLICT, text), f"no set of versions satisfies these requirements: {_conflict(text) or said}", None),
        (missing, f"no package index has {missing} for the Python of {base}", "check the package's name and version"),
        (unread, f"a requirement cannot be read: {unread[1] if unread else ''}", None),
        (
            _any(_HASHES, text),
            f"the hash of a package differs from the hash in the lock file: {_forged(text) or said}",
            "lock the packages again",
        ),
        (
            _any(_BUILD, text),
            f"a package could not be built in {base}: {said}",
            "name a version of the package that has a wheel",
        ),
        (True, f"pip could not install the packages: {said or 'pip printed no message'}", None),
    )
    message, hint = next((message, hint) for is_so, message, hint in kinds if is_so)
    return BadInput(message, hint=hint)


def _any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def _forged(text: str) -> str:
    """Return the package with another hash, as pip names it below its warning."""
    found = re.search(r"DO NOT MATCH THE HASHES[^\n]*\n\s+(\S+)", text)
    return found[1][:MOST_CHARS] if found else ""


def _conflict(text: str) -> str:
    """Return pip's description of the conflict."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "because these package versions have conflicting dependencies" in line:
            found = [each.strip() for each in lines[number + 1 : number + 8]]
            return "; ".join(
                each for each in found if each and not each.startswith(("To fix", "1. ", "2. ", "The conflict is"))
            )
    return ""


def tail(text: str) -> str:
    """Return the end of a text as one line."""
    errors = "\n".join(line for line in text.splitlines() if line.startswith("ERROR: "))
    text = errors or text
    lines: Sequence[str] = [line.strip()[:MOST_CHARS] for line in text.splitlines() if line.strip()]
    shown = [line for line in lines[-MOST_LINES:] if not line.startswith("[notice]")]
    return " | ".join(line.removeprefix("ERROR: ") for line in shown)[-1500:]


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return text


# Requests to Docker's API for the containers of a build. Pure, except that it looks which local indexes exist.


USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST_PROCESSES = 4096
_NETRC, SCRATCH = f"{PLACE}/netrc", f"{PLACE}/scratch"
_LOCAL = ("index-url", "extra-index-url", "find-links", "cert", "client-cert")


@dataclass(frozen=True)
class BuildContainer:
    """Settings and mounts of the build's container.

    Attributes:
        settings: pip's settings, with paths inside the container.
        mounts: (path on the head, path in the container, writable).
    """

    settings: PipSettings
    mounts: tuple[tuple[str, str, bool], ...]


def build_container(plan: EnvironmentPlan, work: Path, pip: Path | None) -> BuildContainer:
    """Return the container of a build in the folder `work`; `pip` is the folder of the head's own pip."""
    settings, found = _localised(plan.settings)
    mounts = [
        (str(work / "in"), f"{PLACE}/in", False),
        (str(work / "scratch"), SCRATCH, True),
        (str(work / "environment"), ENVIRONMENT, True),
        *((source, target, False) for source, target in found.items()),
    ]
    mounts += [(str(plan.wheels.resolve()), WHEELS, False)] if plan.wheels else []
    mounts += [(str(plan.secret.resolve()), _NETRC, False)] if plan.secret else []
    mounts += [(str(pip), f"{PLACE}/pip/pip", False)] if pip else []
    return BuildContainer(settings, tuple(mounts))


def create_request(plan: EnvironmentPlan, made: BuildContainer, user: str) -> dict[str, Any]:
    """Return the body of ``POST /containers/create`` for the build.

    The container runs as the submitting user, without capabilities, and sees only the files of the head that it needs.
    Docker keeps no log.
    """
    environ = {
        "PIP_CONFIG_FILE": f"{PLACE}/in/pip.conf", "HOME": SCRATCH, "TMPDIR": SCRATCH, "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PIP_ROOT_USER_ACTION": "ignore",
        **({"NETRC": _NETRC} if plan.secret else {}),
    }  # fmt: skip
    return {
        "Image": plan.base.id,
        "User": user,
        "WorkingDir": "/",
        "Entrypoint": ["python3"],
        "Cmd": [f"{PLACE}/in/inside.py", *plan.options],
        "Env": [f"{name}={value}" for name, value in environ.items()],
        "HostConfig": {
            "Mounts": [
                {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not writable}
                for source, target, writable in made.mounts
            ],
            "NetworkMode": "none" if plan.settings.is_offline else "host",
            "UsernsMode": "host",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["label=disable", "no-new-privileges"],
            "PidsLimit": MOST_PROCESSES,
            "LogConfig": {"Type": "none"},
        },
    }


def layer_request(plan: EnvironmentPlan, packages: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of ``POST /containers/create`` for the container to commit. It never runs."""
    facts: Mapping[str, Any] = plan.base.facts
    path = next((each[5:] for each in facts.get("Env") or () if each.startswith("PATH=")), USUAL_PATH)
    command = {} if facts.get("Cmd") or facts.get("Entrypoint") else {"Cmd": ["/bin/sh"]}
    return {
        "Image": plan.base.id,
        "Env": [f"PATH={ENVIRONMENT}/bin:{path}", f"VIRTUAL_ENV={ENVIRONMENT}"],
        "Labels": {LABEL: plan.key, BASE: plan.base.reference, PACKAGES: json.dumps(packages)},
        **command,
    }


def _files_of(index: Path) -> Iterator[Path]:
    """Yield the folders beside an index that have its files.

    Mirrors such as bandersnatch's call it ``packages``. Others call it ``files``, which may be a person's own folder,
    so the page of a package must link to it.
    """
    if (packages := index.parent / "packages").is_dir():
        yield packages
    page = next(index.glob("*/index.html"), None)
    with suppress(OSError):
        if page is not None and b"../../files/" in page.read_bytes() and (files := index.parent / "files").is_dir():
            yield files


def _localised(settings: PipSettings) -> tuple[PipSettings, dict[str, str]]:
    """Return the settings with paths inside the container, and a map from paths on the head to paths in the container.

    gpurun mounts an index alone: the build runs code of packages, and the folder above may be somebody's home. Only
    the index's own files beside it come too.
    """
    mounts: dict[str, str] = {}
    folders: dict[Path, str] = {}

    def mount(path: Path, target: str) -> str:
        return mounts.setdefault(str(path.resolve()), target)

    def seen(word: str, key: str) -> str:
        is_url = word.startswith("file://")
        path = Path(unquote(urlsplit(word).path) if is_url else word)
        if not path.is_absolute() or not path.exists():
            return word
        if key.endswith("index-url"):
            folder = folders.setdefault(path.parent.resolve(), f"{PLACE}/local/index{len(folders)}")
            there = mount(path, f"{folder}/{path.name}")
            for files in _files_of(path):
                mount(files, f"{folder}/{files.name}")
        else:
            there = mount(path, f"{PLACE}/local/{len(mounts)}")
        return f"file://{quote(there)}" if is_url else there

    values = {
        key: tuple(seen(word, key) for word in words) if key in _LOCAL else words
        for key, words in settings.values.items()
    }
    return replace(settings, values=values), mounts


# Write an environment's folder as the tar of one layer. The same files always give the same bytes.


MTIME_S = 946_684_800
"""1 January 2000: zip files, which programs make of packages, know no time before 1980."""
_PIECE = 1 << 20
_END = bytes(1024)


def layer_tar(folder: Path, target: str) -> Iterator[bytes]:
    """Yield the tar in pieces: sorted, owned by root, with one time, readable for everybody, without set-ID bits.

    Keeps links. Leaves out sockets, FIFOs and devices.

    Args:
        target: absolute path of the folder in the image; the tar also contains the folders above it.
    """
    above = target.strip("/").split("/")
    for depth in range(1, len(above)):
        yield _header("/".join(above[:depth]), tarfile.DIRTYPE)
    yield from _tree(folder, target.strip("/"))
    yield _END


def _tree(folder: Path, name: str) -> Iterator[bytes]:
    yield _header(name, tarfile.DIRTYPE)
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        path = f"{name}/{entry.name}"
        if stat.S_ISDIR(status.st_mode):
            yield from _tree(folder / entry.name, path)
        elif stat.S_ISLNK(status.st_mode):
            yield _header(path, tarfile.SYMTYPE, target=os.readlink(entry.path))  # noqa: PTH115 - bytes as they are
        elif stat.S_ISREG(status.st_mode):
            yield from _file(folder / entry.name, path, executable=bool(status.st_mode & 0o111))


def _file(path: Path, name: str, *, executable: bool) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = left = os.fstat(descriptor).st_size
        yield _header(name, tarfile.REGTYPE, size=size, mode=0o755 if executable else 0o644)
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise OSError(0, "the file became shorter", str(path))
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


def _header(name: str, kind: bytes, *, size: int = 0, mode: int = 0o755, target: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode, entry.mtime, entry.linkname = kind, size, mode, MTIME_S, target
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


# Short progress messages of a build.


Report = Callable[[str, float], object]
"""Told what a build does, and for how many seconds it has run; again and again."""

_INSTALLING = re.compile(r"Installing collected packages: (.+)")
_NAMED = re.compile(r"\s*(Downloading|Building wheel for|Getting requirements to build wheel)[:\s]+(\S+)")
_COMPILING = COMPILING.decode().strip()


LINE_EVERY_S, SAME_EVERY_S = 2.0, 10.0


class BuildLines:
    """A `Report` for people: prints a line on stderr when a new stage begins, and repeats it while the stage lasts."""

    def __init__(self) -> None:
        self._said_s = float("-inf")
        self._stage = ""

    def __call__(self, stage: str, elapsed_s: float) -> None:
        """Report the current stage."""
        since_s = time.monotonic() - self._said_s
        if since_s >= (SAME_EVERY_S if stage == self._stage else LINE_EVERY_S):
            self._said_s, self._stage = time.monotonic(), stage
            sys.stderr.write(f"        python: {printable(stage)} … {elapsed_s:.0f} s\n")
            sys.stderr.flush()


class BuildLog:
    """Derives the current stage from pip's lines."""

    def __init__(self) -> None:
        self.stage = "starting"
        self._collected = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        """Add more of pip's output, in pieces of any size."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._read(line[:4096])

    def _read(self, line: str) -> None:
        if found := _INSTALLING.match(line):
            self.stage = f"installing {count(len(found[1].split(',')), 'package')}"
        elif line.startswith("Collecting "):
            self._collected += 1
            self.stage = f"resolving, {self._collected} so far"
        elif line == _COMPILING:
            self.stage = "compiling"
        elif (found := _NAMED.match(line)) and not self.stage.startswith("installing"):
            name = found[2].rsplit("/", 1)[-1].strip("()")[:60]
            self.stage = f"{'downloading' if found[1] == 'Downloading' else 'building'} {name}"


# Let SIGTERM and SIGHUP end a build as Ctrl-C does: it removes its container and its files first.


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let these signals raise SystemExit within, with the code that a shell shows for such an end: 128 + number.

    Leaves a signal alone that is ignored, as by nohup, or has a handler; and all of them outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)  # another signal would end the removal half way
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


CONTAINERS = "gpurun-environment"
POLL_S, REMOVE_S = 0.2, 60.0
ABANDONED_S = 24 * 3600.0
"""No build takes a day. A container of this age is removed, although its lock is in a cache folder that is not ours."""
MOST_LOG_BYTES = 1 << 20


def planned(wanted: Environment, image: str, engine: Engine, environ: Mapping[str, str]) -> EnvironmentPlan:
    """Plan the environment on the image that this name means now.

    Raises:
        BadInput: the image is not on the head, or is itself an environment; or the user's input cannot be used.
    """
    requirements_of(wanted)  # a wrong file is said also where Docker does not answer
    base = engine.image(image)
    if (base.facts.get("Labels") or {}).get(LABEL):
        raise BadInput(
            f"gpurun built the image {image} for `python` of an earlier job, so the image cannot be a base image",
            hint="under `image` in the recipe, write the image on which gpurun installed the packages",
        )
    return plan_environment(wanted, base, str(base.facts.get("Architecture", "")), environ)


def ensure(
    wanted: Environment, image: str, engine: Engine, environ: Mapping[str, str], report: Report
) -> tuple[HeadImage, Environment]:
    """Return the image with these packages, built if necessary, and the environment with its installed packages.

    Raises:
        BadInput: pip cannot install the packages; the message is pip's.
        HostNotReady: the index, the network, the disk or Docker fails.
    """
    plan = planned(wanted, image, engine, environ)
    folder = _folder()
    found = lookup(engine, plan)
    if found is not None and any(folder.iterdir()):  # its builder may have been killed after the image was complete
        clear(engine, folder)
    if found is None:
        with unwinding(), _turn(folder, plan.key, report):
            found = lookup(engine, plan)
            if found is None:
                clear(engine, folder, also=plan.key)
                _build(plan, engine, folder / plan.key, report)
                found = lookup(engine, plan)
    if found is None:
        raise HostNotReady(
            f"gpurun has just built the image {plan.reference}, but the head's Docker does not have the image"
        )
    packages = json.loads(found.facts["Labels"][PACKAGES])
    return found, replace(wanted, base=image, base_id=plan.base.id, packages=tuple(map(str, packages)))


def lookup(engine: Engine, plan: EnvironmentPlan) -> HeadImage | None:
    """Return the image, if the head has it."""
    try:
        found = engine.image(plan.reference)
    except BadInput:
        return None
    is_it = (found.facts.get("Labels") or {}).get(LABEL) == plan.key
    return found if is_it and found.layers[:-1] == plan.base.layers else None


def clear(engine: Engine, folder: Path, *, also: str = "") -> None:
    """Remove containers and folders of this user's killed builds.

    Args:
        also: the key whose lock this process holds.

    Raises:
        HostNotReady: the leftovers of this key cannot be removed: they would come into the next build.
    """
    _, found = engine.get(f"/containers/json?all=1&filters={quote(json.dumps({'name': [_names()]}))}")
    by_key: dict[str, list[str]] = {}
    for name, created_s in _listed(found):
        if name.startswith(_names(folder)):
            by_key.setdefault(name.removeprefix(_names(folder)).partition("-")[0], []).append(name)
        elif name.startswith(_names()) and time.time() - created_s > ABANDONED_S:
            with suppress(GpurunError):
                _remove(engine, name)
    for path in folder.iterdir():
        by_key.setdefault(path.name.removesuffix(".lock"), [])
    for key, containers in by_key.items():
        with _free(folder, key) if key != also else nullcontext(enter_result=True) as is_free:
            if is_free:
                with suppress(GpurunError) if key != also else nullcontext():
                    for name in containers:
                        _remove(engine, name)
                    _remove_folder(folder / key)


def container_name(folder: Path, key: str, part: str) -> str:
    """Return the name of a build's container. The lock that tells whether the build lives is in `folder`."""
    return f"{_names(folder)}{key}-{part}"


def _names(folder: Path | None = None) -> str:
    """Return the beginning of the names of this user's containers: all, or those of builds in `folder`."""
    mine = f"{CONTAINERS}-{os.getuid()}-"
    return mine if folder is None else f"{mine}{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}-"


def _listed(found: Any) -> Iterator[tuple[str, float]]:
    """Yield name and time of creation of each container that Docker lists."""
    for each in found if isinstance(found, list) else ():
        for name in each.get("Names") or ():
            yield name.strip("/"), float(each.get("Created") or time.time())


def _remove_folder(path: Path) -> None:
    """Remove a build's folder, also folders in it that a package has made read-only."""
    try:
        below.remove_path(str(path))
    except OSError as error:
        why = f"gpurun cannot remove the folder of an earlier build: {error.strerror}"
        raise HostNotReady(why, where=str(path), hint=f"remove the folder {path} by hand") from None


def _build(plan: EnvironmentPlan, engine: Engine, work: Path, report: Report) -> None:
    try:
        for part in ("in", "scratch", "environment"):
            (work / part).mkdir(mode=0o700, parents=True)
        packages = _install(plan, engine, work, report)
        if lookup(engine, plan) is None:  # another user may have built it meanwhile
            report("adding the layer", 0.0)
            _commit(plan, engine, work, packages)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise failure_of(1, str(error), plan.base.reference) from None
        raise HostNotReady(
            f"gpurun cannot build the environment: {error.strerror}", where=str(error.filename)
        ) from None
    finally:
        with suppress(HostNotReady):  # the next build removes it; here it would hide why this build failed
            _remove_folder(work)


def _install(plan: EnvironmentPlan, engine: Engine, work: Path, report: Report) -> tuple[str, ...]:
    """Run pip; return the installed packages."""
    spec = importlib.util.find_spec("pip")
    pip = Path(spec.origin).parent if spec is not None and spec.origin else None
    made = build_container(plan, work, pip)
    _write(work / "in/pip.conf", made.settings.as_file())
    _write(work / "in/requirements.txt", "\n".join([*plan.requirements.lines, ""]))
    _write(work / "in/constraints.txt", "\n".join([*plan.constraints, ""]))
    _write(work / "in/inside.py", Path(inside.__file__).read_text())
    name = container_name(work.parent, plan.key, "build")
    with _container(engine, name, create_request(plan, made, _user(engine))) as ident:
        status, answer = engine.exchange("POST", f"/containers/{ident}/start")
        if status != 204:
            raise _unstarted(str((answer or {}).get("message", status)), plan.base.reference)
        code = _followed(engine, ident, work / "scratch/log", report)
    if code:
        secrets = (*plan.settings.secrets, *secrets_of(plan.secret))
        log, details = (_read(work / "scratch" / name).decode(errors="replace") for name in ("log", "pip.log"))
        raise failure_of(code, log, plan.base.reference, secrets, details)
    try:
        return tuple(map(str, json.loads(_read(work / "scratch/packages.json"))))
    except (ValueError, TypeError, RecursionError):
        raise BadInput(
            "the code of a package damaged the list of installed packages during the build", where=plan.base.reference
        ) from None


def _followed(engine: Engine, ident: str, log: Path, report: Report) -> int:
    """Follow the container until it ends; return its exit code."""
    begun, said, seen = time.monotonic(), BuildLog(), 0
    while True:
        status, found = engine.get(f"/containers/{ident}/json")
        piece = _read(log, start=seen)
        seen += len(piece)
        said.feed(piece.decode(errors="replace"))
        report(said.stage, time.monotonic() - begun)
        if status != 200:
            raise HostNotReady("somebody removed the container that built the environment", hint="submit the job again")
        if not found["State"]["Running"]:
            return int(found["State"]["ExitCode"])
        time.sleep(POLL_S)


def _commit(plan: EnvironmentPlan, engine: Engine, work: Path, packages: tuple[str, ...]) -> None:
    name, tar = container_name(work.parent, plan.key, "layer"), layer_tar(work / "environment", inside.ENVIRONMENT)
    with _container(engine, name, layer_request(plan, packages)) as ident:
        status, answer = engine.upload(f"/containers/{ident}/archive?path=/", tar)
        if status != 200:
            raise _refused(answer, "did not accept the layer of the environment")
        if (
            lookup(engine, plan) is not None
        ):  # a second commit would take the name from that image, and leave it nameless
            return
        query = f"container={ident}&repo={quote(NAME, safe='')}&tag={plan.reference.partition(':')[2]}"
        status, answer = engine.exchange("POST", f"/commit?{query}", {}, timeout_s=None)
        if status != 201:
            raise _refused(answer, "did not create the image of the environment")


@contextmanager
def _container(engine: Engine, name: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Run a container, and remove it at the end in any case."""
    _remove(engine, name)
    try:
        status, answer = engine.exchange("POST", f"/containers/create?name={name}", body)
        if status != 201:
            raise _refused(answer, "did not create a container")
        yield str(answer["Id"])
    finally:
        with suppress(GpurunError):
            _remove(engine, name)


def _remove(engine: Engine, name: str) -> None:
    """Remove a container, and wait until it is gone: before, it can still write to its folders.

    Raises:
        HostNotReady: Docker does not remove it.
    """
    deadline = time.monotonic() + REMOVE_S
    while True:
        status, answer = engine.exchange("DELETE", f"/containers/{name}?force=1&v=1")
        if status in (204, 404):
            return
        if status != 409 or time.monotonic() > deadline:  # 409: it is being removed
            raise _refused(answer, f"did not remove the container {name}")
        time.sleep(POLL_S)


def _refused(answer: Any, what: str) -> GpurunError:
    message = str(answer.get("message", "")) if isinstance(answer, dict) else ""
    if "no space left" in message.lower():
        return failure_of(1, "No space left on device", "")
    return HostNotReady(f"the head's Docker {what}: {message[:400]}")


def _unstarted(message: str, base: str) -> GpurunError:
    if "python3" in message and ("not found" in message or "no such file" in message):
        return BadInput(f"the image {base} has no python3", hint="`python` in a recipe needs an image with Python")
    return _refused({"message": message}, "did not start the build of the environment")


def _user(engine: Engine) -> str:
    """Return the user who submits. A rootless engine calls that user root."""
    options = engine.info().get("SecurityOptions") or ()
    return "0:0" if any("name=rootless" in str(each) for each in options) else f"{os.getuid()}:{os.getgid()}"


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: Path, start: int | None = None) -> bytes:
    """Read a piece of a build's file from `start`, else its end. Returns nothing for files that are not regular."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        file.seek(max(0, status.st_size - MOST_LOG_BYTES) if start is None else start)
        return file.read(MOST_LOG_BYTES)


def _folder() -> Path:
    folder = default_folder().parent / "environments"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _turn(folder: Path, key: str, report: Report) -> Iterator[None]:
    """Hold the lock of a key while its environment is built."""
    with _free(folder, key) as is_free:
        if is_free:
            yield
            return
    report("waiting for another build of the same environment", 0.0)
    with locks.alone(_lock_file(folder, key), remove=True):
        yield


@contextmanager
def _free(folder: Path, key: str) -> Iterator[bool]:
    """Return whether nobody builds this environment. If so, hold its lock until the end."""
    path = _lock_file(folder, key)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        is_free = locks.try_take(descriptor) and _has_name(descriptor, path)
        try:
            yield is_free
        finally:
            if is_free:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _has_name(descriptor: int, path: Path) -> bool:
    """Return whether the open file still has this name: the previous holder of its lock may have removed it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_file(folder: Path, key: str) -> Path:
    """Return the lock file of a key. The holder of the lock removes the file."""
    return folder / f"{key}.lock"
