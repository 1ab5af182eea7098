"""The probe: this host's hardware and state, as one JSON document.

It runs in two ways: as operations of the agent (``probe.facts`` and the others in `OPS`), and alone, as a zipapp
(``python3 probe.pyz``). It reads every section separately: ``problems`` names sections that fail, the others are there.
Keys are those of `gpurun.facts.Hardware`.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import threading
import time
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Tuple
from urllib.parse import quote

from gpurun.node import docker, nvml
from gpurun.node.agent import serve
from gpurun.node.agent.frames import OpError
from gpurun.node.docker import NoEngine, image_root, is_rootless, of_jobs, serving
from gpurun.node.folder.contents import write_all
from gpurun.node.nvml_apart import NoAnswer, Nvml
from gpurun.node.probe.facts import (
    Listener,
    dmabuf,
    gpu_places,
    hcas,
    ip_addresses,
    link_speed,
    machine_id,
    nics,
    peermem,
    qos,
    read_sysfs,
    sysfs_names,
    try_connections,
)

# Facts about the host's Docker engine, from its socket.


ANSWER_TIMEOUT_S, VERSION_TIMEOUT_S = 10.0, 4.0
"""An engine that has answered the first question answers the second at once. Both end before the probe does."""

CAP_SYS_RESOURCE = 24  # linux/capability.h
HOOK, CDI_HOOK = "nvidia-container-runtime-hook", "nvidia-cdi-hook"
CDI_SINCE = 28


def get(path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Return the JSON answer to one GET. Raises OSError or ValueError (no engine, no permission, no JSON)."""
    status, answer = _exchange(path, timeout_s)
    if status != 200:
        raise OSError("Docker answered %d to GET %s" % (status, path))
    return json.loads(answer.decode("utf-8", "replace"))


def _exchange(path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Tuple[int, bytes]:
    connection = docker.Connection(docker.socket_path(), timeout_s)
    try:
        return docker.exchange(connection, "GET", path)
    except http.client.HTTPException as error:
        raise OSError("Docker's answer to GET %s is not HTTP: %s" % (path, error)) from None
    finally:
        connection.close()


def collect_docker_facts() -> Dict[str, Any]:
    """Return `gpurun.facts.DockerFacts`, with ``problem`` instead of an exception."""
    try:
        path = docker.socket_path()
        info = _docker_info(path)
    except OpError as error:
        return {"problem": error.message}
    rootless, limits = is_rootless(info), engine_limits(_pid_of_engine(path))
    if rootless:  # its capabilities count in its own user namespace alone (user_namespaces(7))
        limits["may_raise_limits"] = False
    root = image_root(info)
    return {
        "socket": path,
        "version": str(info.get("ServerVersion") or ""),
        "storage_driver": str(info.get("Driver") or ""),
        "architecture": str(info.get("Architecture") or ""),
        "root": root,
        "gpu_support": gpu_support(info),
        "is_rootless": rootless,
        **_space(root),
        **_share(info),
        **limits,
    }


def _docker_info(path: str) -> Dict[str, Any]:
    """Return ``docker info``. Raises OpError with a message that people can act on."""
    try:
        info, version = get("/info"), get("/version", VERSION_TIMEOUT_S)
    except PermissionError:
        problem = "this user may not use %s" % path
    except (FileNotFoundError, ConnectionRefusedError):
        problem = "no Docker engine answers at %s" % path
    except socket.timeout:
        problem = "the Docker engine at %s does not answer within %g s" % (path, ANSWER_TIMEOUT_S)
    except (OSError, ValueError) as error:
        problem = "%s: %s" % (type(error).__name__, error)
    else:
        if _is_podman(version):
            problem = "Podman answers at %s: gpurun needs Docker's own engine" % path
        elif not isinstance(info, dict) or not info.get("ServerVersion"):
            problem = "the program that answers at %s is not Docker" % path
        else:
            return info
    raise OpError("no-docker", problem)


def _is_podman(version: Any) -> bool:
    components = version.get("Components") if isinstance(version, dict) else None
    return any(isinstance(one, dict) and "Podman" in str(one.get("Name")) for one in components or ())


def engine_limits(pid: Optional[int], proc: str = "/proc") -> Dict[str, Any]:
    """Return the limits that the engine's containers can get, and whether they share this host's network.

    These are the engine's own hard limits, or any limit if it may raise them. runc sets a container's limits with the
    engine's rights. More than the hard limit needs CAP_SYS_RESOURCE (setrlimit(2)), which an engine in a container, a
    rootless engine, or a restricted systemd unit may lack.
    """
    if pid is None:
        return {}
    limits = _read_of_docker_facts(proc, str(pid), "limits")
    return {
        "memlock_bytes": hard_limit(limits, "Max locked memory"),
        "nofile": hard_limit(limits, "Max open files"),
        "may_raise_limits": has_capability(_read_of_docker_facts(proc, str(pid), "status"), "CapEff"),
        "has_own_network": _differ(os.path.join(proc, str(pid), "ns/net"), os.path.join(proc, "self/ns/net")),
    }


def _pid_of_engine(socket_path: str) -> Optional[int]:
    try:
        process = serving(socket_path)
    except (OSError, NoEngine):
        return None
    return None if process is None else process.pid


def _differ(one: str, other: str) -> Optional[bool]:
    try:
        return os.readlink(one) != os.readlink(other)
    except OSError:  # of another user: then it is no rootless one of ours
        return None


def hard_limit(limits: str, name: str) -> Optional[int]:
    """Return a hard limit from ``/proc/PID/limits``; -1 = unlimited, None = not there."""
    match = re.search(re.escape(name) + r"\s+\S+\s+(unlimited|\d+)", limits)
    return None if not match else -1 if match.group(1) == "unlimited" else int(match.group(1))


def has_capability(status: str, which: str, bit: int = CAP_SYS_RESOURCE) -> Optional[bool]:
    """Return whether a capability is in a set of ``/proc/PID/status``; None = not there."""
    match = re.search(which + r":\s*([0-9a-f]+)", status)
    return bool(int(match.group(1), 16) >> bit & 1) if match else None


def _read_of_docker_facts(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 14)
    except OSError:
        return ""


def gpu_support(info: Dict[str, Any]) -> str:
    """Return how ``docker run --gpus`` would work.

    In Docker's own order: CDI, a registered ``nvidia`` runtime, or the container toolkit's hook on the engine's PATH,
    which the engine looks up when it starts (moby `daemon/nvidia_linux.go`).

    ``--gpus`` uses CDI only since moby's pull request 50228 (opened in June 2025; some releases of 28 lack it), with
    CDI switched on, and with the toolkit's `nvidia-cdi-hook` on the engine's PATH. Engines since 25 that have a CDI
    file alone take only ``--device nvidia.com/gpu=0``.
    """
    folders = info.get("CDISpecDirs") or ()
    version = re.match(r"(\d{1,4})\.", str(info.get("ServerVersion")))
    is_new = version is not None and int(version.group(1)) >= CDI_SINCE
    if is_new and _is_there(CDI_HOOK) and any(_has_nvidia_spec(folder) for folder in folders):
        return "cdi"
    if "nvidia" in (info.get("Runtimes") or {}):
        return "runtime"
    return "hook" if _is_there(HOOK) else ""


def _is_there(program: str) -> bool:
    """Return whether the engine finds a program of the toolkit."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"])
    return shutil.which(program, path=path) is not None


def _has_nvidia_spec(folder: str) -> bool:
    try:
        return any("nvidia" in name for name in os.listdir(folder))
    except OSError:
        return False


def _share(info: Dict[str, Any]) -> Dict[str, Any]:
    """Return what the engine has for containers, and whether it can limit it; None for what it does not say."""
    memory, cores, limits = info.get("MemTotal"), info.get("NCPU"), info.get("MemoryLimit")
    return {
        "memory_bytes": memory if isinstance(memory, int) and memory > 0 else None,
        "cores": cores if isinstance(cores, int) and cores > 0 else None,
        "limits_memory": limits if isinstance(limits, bool) else None,
    }


def _space(root: str) -> Dict[str, Any]:
    try:
        found = os.statvfs(root)
    except OSError:
        return {"free_bytes": None, "total_bytes": None}
    return {"free_bytes": found.f_bavail * found.f_frsize, "total_bytes": found.f_blocks * found.f_frsize}


def job_containers() -> Dict[str, str]:
    """Return container id → gpurun job id for running containers of gpurun jobs; empty if Docker does not say."""
    filters = quote(json.dumps({"label": ["gpurun.job"]}))
    try:
        found = of_jobs(get("/containers/json?filters=" + filters), _exchange)
        return {str(one["Id"]): str(one["Labels"]["gpurun.job"]) for one in found}
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


# Signs by which hosts see that they have one folder, whatever its file system calls itself.


FOLDER = "signs"
STALE_S = 3600.0
"""Hosts that are probed together make their signs within a minute."""


def show_sign(folder: str) -> Tuple[str, List[str]]:
    """Make a new sign in gpurun's folder; return it, and all that are there.

    Removes old ones, by the file system's clock: those of hosts may differ.
    """
    place = os.path.join(folder, FOLDER)
    os.makedirs(place, mode=0o700, exist_ok=True)
    mine = os.urandom(16).hex()
    path = os.path.join(place, mine)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    made_s = os.stat(path).st_mtime
    for name in set(seen(folder)) - {mine}:
        other = os.path.join(place, name)
        try:
            if made_s - os.lstat(other).st_mtime > STALE_S:
                os.unlink(other)
        except OSError:  # another host has removed it, or it is no sign
            continue
    return mine, seen(folder)


def seen(folder: str) -> List[str]:
    """Return the signs in gpurun's folder, sorted."""
    try:
        return sorted(os.listdir(os.path.join(folder, FOLDER)))
    except FileNotFoundError:
        return []


# Whether a job could keep its files on this host: try what a job does first, and say why it fails.


TRY_TIMEOUT_S = 25.0
"""A healthy disk answers in milliseconds. One to which a job writes a large checkpoint may need many seconds."""

PARTS = ("jobs", "outputs")
_SMALL = b"gpurun checks whether jobs can write here\n"


def collect_folder_facts(folder: str, mountinfo: List[str]) -> Dict[str, Any]:
    """Return the folder's keys of `gpurun.facts.Hardware`.

    Args:
        mountinfo: see `gpurun.node.agent.serve.mounts`.
    """
    found = {}  # type: Dict[str, Any]
    thread = threading.Thread(target=_look, args=(found, folder, mountinfo), daemon=True)
    thread.start()
    thread.join(TRY_TIMEOUT_S)
    if thread.is_alive():
        problem = "the file system of %s does not answer within %g s" % (folder, TRY_TIMEOUT_S)
        return {"folder": folder, "folder_fault": "hangs", "folder_problem": problem}
    return {"folder": folder, **found}


def _look(found: Dict[str, Any], folder: str, mountinfo: List[str]) -> None:
    fault, problem = try_to_write(folder, mountinfo)
    sign, signs = "", []  # type: Tuple[str, List[str]]
    if not fault:
        try:
            sign, signs = show_sign(folder)
        except OSError as error:
            fault, problem = serve.fault_of(error, folder, mountinfo)
    free_bytes, free_inodes = serve.free(folder)
    found.update(
        {
            "folder_kind": serve.filesystem(os.path.realpath(folder), mountinfo),
            "folder_fault": fault,
            "folder_problem": problem,
            "folder_free_bytes": free_bytes,
            "folder_free_inodes": free_inodes,
            "folder_sign": sign,
            "folder_signs": signs,
        }
    )


def try_to_write(folder: str, mountinfo: List[str]) -> Tuple[str, str]:
    """Create, write, sync and remove a small file where jobs and their outputs are kept.

    Returns:
        The fault and the problem, see `gpurun.node.agent.serve.fault_of`; two empty texts if all went well.
    """
    for part in PARTS:
        path = os.path.join(folder, part)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            _write_one(path)
        except OSError as error:
            return serve.fault_of(error, path, mountinfo)
    return "", ""


def why_unwritable(folder: str) -> str:
    """Return why no small file can be written to a folder, in words; "" if one can, or if there is no folder."""
    try:
        _write_one(folder)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return serve.fault_of(error, folder, serve.mounts())[1]
    return ""


def _write_one(folder: str) -> None:
    path = os.path.join(folder, ".probe." + os.urandom(8).hex())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, _SMALL, 0)
        _sync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _sync(descriptor: int) -> None:
    """Write the file to the disk, except on a file system that cannot sync: jobs run there, too."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


SECTION_TIMEOUT_S = 20.0
"""Longer than NVML may take (`gpurun.node.nvml_apart.ANSWER_S`), and than both questions to Docker."""


class Roots:
    """The roots to read from: the real system, or a recorded or simulated tree.

    ``GPURUN_SYSFS`` and ``GPURUN_DEV`` point at such a tree.
    """

    def __init__(self, sysfs: str = "", dev: str = "", proc: str = "/proc", etc: str = "/etc") -> None:
        self.sysfs = sysfs or os.environ.get("GPURUN_SYSFS") or "/sys"
        self.dev = dev or os.environ.get("GPURUN_DEV") or "/dev"
        self.proc = proc
        self.etc = etc


def probe_document(interfaces: Optional[List[str]] = None, roots: Optional[Roots] = None) -> Dict[str, Any]:
    """Return everything about this host.

    Args:
        interfaces: the fabrics' interfaces; queueing is only read for these. None = those of HCAs.
        roots: the roots to read from.
    """
    roots = roots or Roots()
    started = time.monotonic()
    found = {"problems": {}}  # type: Dict[str, Any]
    threads = [
        threading.Thread(target=_into, args=(found, name, section, roots), daemon=True)
        for name, section in (("gpus", _gpus), ("docker", _docker))
    ]
    for thread in threads:
        thread.start()
    for name, section in (
        ("system", _system),
        ("hcas", _hcas),
        ("nics", _nics),
        ("limits", _limits),
        ("folder", _folder),
    ):
        _into(found, name, section, roots)
    for thread in threads:
        thread.join(max(0.0, started + SECTION_TIMEOUT_S - time.monotonic()))
    for name in ("gpus", "docker"):
        if name not in found:
            found["problems"].setdefault(name, "no answer within %g s" % SECTION_TIMEOUT_S)
    _into(found, "processes", lambda _: _name_processes(found, roots), roots)
    _into(found, "qos", lambda _: _qos(found, interfaces), roots)
    found["elapsed_s"] = round(time.monotonic() - started, 4)
    return found


def _into(found: Dict[str, Any], name: str, section: Callable[[Roots], Dict[str, Any]], roots: Roots) -> None:
    """Add one section's keys; if it fails, add the error to ``problems``."""
    try:
        found.update(section(roots))
    except Exception as error:  # noqa: BLE001 - one broken section must not hide the others
        found["problems"][name] = "%s: %s" % (type(error).__name__, error)


def _system(roots: Roots) -> Dict[str, Any]:
    name = socket.gethostname()
    kernel = platform.release()
    return {
        "hostname": name,
        "machine_id": machine_id(roots.sysfs, roots.etc),
        "kernel": kernel,
        "python": platform.python_version(),
        "clock_s": time.time(),
        "resolves_to": _resolve(name),
        "peermem": peermem(roots.sysfs),
        "dmabuf": dmabuf(roots.proc, kernel),
    }


def _resolve(name: str) -> List[str]:
    """Return the addresses of a name here; empty if it has none, or the name service does not answer."""
    return look_up([name])[name] or []


def look_up(names: List[str], timeout_s: float = 3.0) -> Dict[str, Optional[List[str]]]:
    """Return name → its addresses here, in the resolver's order; empty if it has none, None without an answer in
    time.
    """
    found = dict.fromkeys(names)  # type: Dict[str, Optional[List[str]]]

    def look(name: str) -> None:
        try:
            entries = socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM)
            found[name] = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except (OSError, UnicodeError):
            found[name] = []

    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in names]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _hcas(roots: Roots) -> Dict[str, Any]:
    nodes = sysfs_names(roots.dev, "infiniband")
    gdrdrv = "gdrdrv" in sysfs_names(roots.dev)
    return {"hcas": hcas(roots.sysfs), "infiniband_nodes": nodes, "gdrdrv": gdrdrv}


def _nics(roots: Roots) -> Dict[str, Any]:
    return {"nics": nics(roots.sysfs, ip_addresses(), link_speed)}


def _limits(roots: Roots) -> Dict[str, Any]:
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nofile, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = read_sysfs(roots.proc, "1/status") or ""
    may_raise = has_capability(first, "CapBnd")
    return {"limits": {"memlock_bytes": memlock, "nofile": nofile, "machine_may_raise": may_raise}}


def _folder(roots: Roots) -> Dict[str, Any]:
    return collect_folder_facts(serve.root(), serve.mounts(roots.proc))


def _docker(_roots: Roots) -> Dict[str, Any]:
    return {"docker": collect_docker_facts()}


def _gpus(roots: Roots) -> Dict[str, Any]:
    with Nvml() as apart:
        try:
            found = apart.ask_host("facts")
        except NoAnswer as error:
            return {"gpus": [], "gpu_problem": str(error)}
    gpu_places(roots.sysfs, found["gpus"])
    return found


def _name_processes(found: Dict[str, Any], roots: Roots) -> Dict[str, Any]:
    gpus = found.get("gpus", [])
    if any(gpu["processes"] for gpu in gpus):
        nvml.name_processes(gpus, roots.proc, job_containers())
    return {}


def _qos(found: Dict[str, Any], interfaces: Optional[List[str]]) -> Dict[str, Any]:
    wanted = interfaces or [name for hca in found.get("hcas", []) for name in hca["interfaces"]]
    for nic in found.get("nics", []):
        if nic["name"] in wanted:
            nic.update(qos(nic["name"]))
    return {}


# -- operations of the agent ------------------------------------------------------------------------------


def facts(_call: Any, interfaces: Optional[List[str]] = None) -> Dict[str, Any]:
    """``probe.facts``: the whole document."""
    return probe_document(interfaces)


def clock(_call: Any) -> Dict[str, float]:
    """``probe.clock``: this host's clock, seconds since 1970. The head measures the offset around the call."""
    return {"clock_s": time.time()}


def sample(call: Any, interval_s: float = 2.0) -> Iterator[Dict[str, Any]]:
    """``probe.sample``: load, memory, temperature and power of every GPU, every `interval_s`, until cancelled."""
    with Nvml() as apart:
        try:
            while True:
                yield {**apart.ask_host("sample"), "clock_s": time.time()}
                call.wait(interval_s)
        except NoAnswer as error:
            yield {"gpus": [], "clock_s": time.time(), "problem": str(error)}


def listen(
    call: Any, address: str, ports: List[List[int]], limit_s: float = 60.0
) -> Generator[Dict[str, Any], None, Dict[str, Any]]:
    """``probe.listen``: yields the ports it listens on, then accepts connections until cancelled.

    Args:
        ports: one listening port out of each range [first, last]; [0, 0] lets the system choose.
    """
    listener = Listener(address, ports, lambda: call.cancelled, limit_s)
    try:
        yield {"ports": listener.ports}
        return {"accepted": listener.serve()}
    finally:
        listener.close()


def connect(
    _call: Any, targets: List[Dict[str, Any]], source: Optional[str] = None, timeout_s: float = 3.0
) -> List[Dict[str, Any]]:
    """``probe.connect``: try to connect to every target; outcomes in their order."""
    return try_connections(targets, source, timeout_s)


def resolve(_call: Any, names: List[str]) -> Dict[str, Optional[List[str]]]:
    """``probe.resolve``: name → addresses; empty = does not resolve, None = no answer in time."""
    return look_up(names)


def signs(_call: Any) -> List[str]:
    """``probe.signs``: the signs of hosts in gpurun's folder, as in ``folder_signs`` of the document."""
    return seen(serve.root())


OPS = {
    "facts": facts,
    "clock": clock,
    "sample": sample,
    "signs": signs,
    "listen": listen,
    "connect": connect,
    "resolve": resolve,
}


def main() -> None:
    """Run alone: print the document on stdout. ``--interface NAME`` may be given any number of times."""
    arguments = sys.argv[1:]
    interfaces = [value for flag, value in zip(arguments, arguments[1:]) if flag == "--interface"]
    json.dump(probe_document(interfaces or None), sys.stdout)
    sys.stdout.write("\n")
