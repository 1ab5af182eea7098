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
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpurun.environments import inside
from gpurun.environments.container import build_container, create_request, layer_request
from gpurun.environments.failures import failure_of
from gpurun.environments.layer import layer_tar
from gpurun.environments.log import BuildLog, Report
from gpurun.environments.pip_settings import secrets_of
from gpurun.environments.plan import LABEL, NAME, PACKAGES, EnvironmentPlan, plan_environment, requirements_of
from gpurun.environments.unwinding import unwinding
from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.images.engine import Engine, HeadImage
from gpurun.images.export import default_folder
from gpurun.jobs.spec import Environment
from gpurun.node.folder import below
from gpurun.state import lock

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
    with lock.alone(_lock_file(folder, key), remove=True):
        yield


@contextmanager
def _free(folder: Path, key: str) -> Iterator[bool]:
    """Return whether nobody builds this environment. If so, hold its lock until the end."""
    path = _lock_file(folder, key)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        is_free = lock.try_take(descriptor) and _has_name(descriptor, path)
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
