"""The probe: this host's hardware and state, as one JSON document.

It runs in two ways: as operations of the agent (``probe.facts`` and the others in `OPS`), and alone, as a zipapp
(``python3 probe.pyz``). It reads every section separately: ``problems`` names sections that fail, the others are there.
Keys are those of `gpurun.facts.hardware.Hardware`.
"""

import json
import os
import platform
import resource
import socket
import sys
import threading
import time
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional

from gpurun.node.agent import place
from gpurun.node.gpu import nvml_facts
from gpurun.node.probe import apart, docker_facts, folder_facts, folder_signs, machine, network, sysfs_facts

NVML_TIMEOUT_S = 10.0
FIRST_TRY_S = 4.0
"""A healthy driver answers in tens of milliseconds, after a cold start without persistence mode in seconds."""

SECTION_TIMEOUT_S = FIRST_TRY_S + NVML_TIMEOUT_S + 6.0

NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND


class Roots:
    """The roots to read from: the real system, or a recorded or simulated tree.

    ``GPURUN_SYSFS`` and ``GPURUN_DEV`` point at such a tree.
    """

    def __init__(self, sysfs: str = "", dev: str = "", proc: str = "/proc", etc: str = "/etc") -> None:
        self.sysfs = sysfs or os.environ.get("GPURUN_SYSFS") or "/sys"
        self.dev = dev or os.environ.get("GPURUN_DEV") or "/dev"
        self.proc = proc
        self.etc = etc


def document(interfaces: Optional[List[str]] = None, roots: Optional[Roots] = None) -> Dict[str, Any]:
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
        "machine_id": machine.machine_id(roots.sysfs, roots.etc),
        "kernel": kernel,
        "python": platform.python_version(),
        "clock_s": time.time(),
        "resolves_to": _resolve(name),
        "peermem": sysfs_facts.peermem(roots.sysfs),
        "dmabuf": sysfs_facts.dmabuf(roots.proc, kernel),
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
    nodes = sysfs_facts.names(roots.dev, "infiniband")
    gdrdrv = "gdrdrv" in sysfs_facts.names(roots.dev)
    return {"hcas": sysfs_facts.hcas(roots.sysfs), "infiniband_nodes": nodes, "gdrdrv": gdrdrv}


def _nics(roots: Roots) -> Dict[str, Any]:
    return {"nics": network.nics(roots.sysfs, network.ip_addresses(), network.link_speed)}


def _limits(roots: Roots) -> Dict[str, Any]:
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nofile, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = sysfs_facts.read(roots.proc, "1/status") or ""
    may_raise = docker_facts.has_capability(first, "CapBnd")
    return {"limits": {"memlock_bytes": memlock, "nofile": nofile, "machine_may_raise": may_raise}}


def _folder(roots: Roots) -> Dict[str, Any]:
    return folder_facts.facts(place.root(), place.mounts(roots.proc))


def _docker(_roots: Roots) -> Dict[str, Any]:
    return {"docker": docker_facts.facts()}


def _gpus(roots: Roots) -> Dict[str, Any]:
    # Imported before the fork: in the child of a process with threads, an import may wait for a lock whose holder is
    # not there. A child can still be born with such a lock, so no answer counts only the second time.
    try:
        import pynvml  # noqa: F401, PLC0415
    except ImportError as error:
        return {"gpus": [], "gpu_problem": "reading NVML failed: %s" % error}
    try:
        try:
            found = apart.ask(_read_nvml, FIRST_TRY_S)  # type: Dict[str, Any]
        except apart.TooSlow:
            found = apart.ask(_read_nvml, NVML_TIMEOUT_S)
    except apart.TooSlow as error:
        return {"gpus": [], "gpu_problem": "the NVIDIA driver hangs: %s" % error}
    except apart.Died as error:
        return {"gpus": [], "gpu_problem": "reading NVML failed: %s" % error}
    sysfs_facts.gpu_places(roots.sysfs, found["gpus"])
    return found


def _read_nvml() -> Dict[str, Any]:
    import pynvml  # noqa: PLC0415 - 330 kB of source, needed only in this process

    try:
        return nvml_facts.read(pynvml)
    except pynvml.NVMLError as error:
        none = "no NVIDIA driver: " if error.value in NO_DRIVER else "NVML: "
        return {"gpus": [], "gpu_problem": none + str(error)}


def _name_processes(found: Dict[str, Any], roots: Roots) -> Dict[str, Any]:
    gpus = found.get("gpus", [])
    if any(gpu["processes"] for gpu in gpus):
        nvml_facts.name_processes(gpus, roots.proc, docker_facts.job_containers())
    return {}


def _qos(found: Dict[str, Any], interfaces: Optional[List[str]]) -> Dict[str, Any]:
    wanted = interfaces or [name for hca in found.get("hcas", []) for name in hca["interfaces"]]
    for nic in found.get("nics", []):
        if nic["name"] in wanted:
            nic.update(network.qos(nic["name"]))
    return {}


# -- operations of the agent ------------------------------------------------------------------------------


def facts(_call: Any, interfaces: Optional[List[str]] = None) -> Dict[str, Any]:
    """``probe.facts``: the whole document."""
    return document(interfaces)


def clock(_call: Any) -> Dict[str, float]:
    """``probe.clock``: this host's clock, seconds since 1970. The head measures the offset around the call."""
    return {"clock_s": time.time()}


def sample(call: Any, interval_s: float = 2.0) -> Iterator[Dict[str, Any]]:
    """``probe.sample``: load, memory, temperature and power of every GPU, every `interval_s`, until cancelled."""

    def read() -> Iterator[Any]:
        import pynvml  # noqa: PLC0415

        return nvml_facts.samples(pynvml, lambda: time.sleep(interval_s))

    source = apart.items(read, interval_s + NVML_TIMEOUT_S)
    try:
        for gpus in source:
            yield {"gpus": gpus, "clock_s": time.time()}
            call.check()
    except (apart.TooSlow, apart.Died) as error:
        yield {"gpus": [], "clock_s": time.time(), "problem": str(error)}
    finally:
        source.close()  # type: ignore[attr-defined]


def listen(
    call: Any, address: str, ports: List[List[int]], limit_s: float = 60.0
) -> Generator[Dict[str, Any], None, Dict[str, Any]]:
    """``probe.listen``: yields the ports it listens on, then accepts connections until cancelled.

    Args:
        ports: one listening port out of each range [first, last]; [0, 0] lets the system choose.
    """
    listener = network.Listener(address, ports, lambda: call.cancelled, limit_s)
    try:
        yield {"ports": listener.ports}
        return {"accepted": listener.serve()}
    finally:
        listener.close()


def connect(
    _call: Any, targets: List[Dict[str, Any]], source: Optional[str] = None, timeout_s: float = 3.0
) -> List[Dict[str, Any]]:
    """``probe.connect``: try to connect to every target; outcomes in their order."""
    return network.connect(targets, source, timeout_s)


def resolve(_call: Any, names: List[str]) -> Dict[str, Optional[List[str]]]:
    """``probe.resolve``: name → addresses; empty = does not resolve, None = no answer in time."""
    return look_up(names)


def signs(_call: Any) -> List[str]:
    """``probe.signs``: the signs of hosts in gpurun's folder, as in ``folder_signs`` of the document."""
    return folder_signs.seen(place.root())


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
    json.dump(document(interfaces or None), sys.stdout)
    sys.stdout.write("\n")
