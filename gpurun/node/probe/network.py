"""Network interfaces, and test connections between hosts."""

import array
import contextlib
import errno
import fcntl
import json
import os
import random
import re
import selectors
import shutil
import socket
import struct
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional

from gpurun.node.probe import sysfs_facts

SIOCETHTOOL, ETHTOOL_GSET = 0x8946, 0x00000001
PORT_TRIES = 20
SKIPPED = re.compile(r"(lo|docker\d+|br-[0-9a-f]{12}|veth[0-9a-f]+)\Z")
"""Interfaces no job ever uses: loopback, Docker's own bridges and their ends."""


def nics(sysfs: str, documents: List[Dict[str, Any]], speed: Callable[[str], Optional[int]]) -> List[Dict[str, Any]]:
    """Return interfaces, as `gpurun.facts.hardware.Nic`, from the output of ``ip -json address`` and sysfs."""
    found = []
    for document in documents:
        name = document.get("ifname", "")
        if not name or SKIPPED.match(name):
            continue
        device = os.path.join(sysfs, "class/net", name, "device")
        found.append(
            {
                "name": name,
                "state": document.get("operstate", ""),
                "mtu": document.get("mtu"),
                "speed_mbit": speed(name),
                "mac": document.get("address", ""),
                "addresses": _addresses(document),
                "driver": _driver(sysfs, name),
                "numa_node": sysfs_facts.numa_node(device),
            }
        )
    return found


def _driver(sysfs: str, name: str) -> str:
    """Return a card's driver, ``bonding`` for a bond of cards, empty for a virtual interface, whose speed means
    nothing.
    """
    driver = os.path.realpath(os.path.join(sysfs, "class/net", name, "device/driver"))
    if os.path.isdir(driver):
        return os.path.basename(driver)
    return "bonding" if os.path.isdir(os.path.join(sysfs, "class/net", name, "bonding")) else ""


def _addresses(document: Dict[str, Any]) -> List[str]:
    return [
        "%s/%s" % (entry["local"], entry.get("prefixlen"))
        for entry in document.get("addr_info", ())
        if entry.get("local") and not entry["local"].startswith("fe80:")
    ]


def ip_addresses() -> List[Dict[str, Any]]:
    """Return the output of ``ip -json address show``. Raises OSError if there is no such program or it fails."""
    program = find_program("ip")
    done = subprocess.run([program, "-json", "address", "show"], stdout=subprocess.PIPE, timeout=10, check=False)
    if done.returncode:
        raise OSError("ip -json address show failed with exit code %d" % done.returncode)
    # iproute2 before 5.0 prints an empty object for each interface that it filtered out.
    return [entry for entry in json.loads(done.stdout.decode("utf-8", "replace")) if entry]


def find_program(name: str) -> str:
    """Return a program's path; SSH sessions of ordinary users often lack /sbin on PATH. Raises OSError."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin"])
    found = shutil.which(name, path=path)
    if not found:
        raise OSError("there is no program %s" % name)
    return found


def link_speed(name: str) -> Optional[int]:
    """An interface's speed in Mbit/s, as its driver answers ETHTOOL_GSET (linux/ethtool.h); None if it has none."""
    command = array.array("B", struct.pack("I40x", ETHTOOL_GSET))  # struct ethtool_cmd
    request = struct.pack("16sP", name.encode()[:15], command.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock.fileno(), SIOCETHTOOL, request)
        except OSError:
            return None
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    speed = high << 16 | low
    return None if speed in (0, 0xFFFF, 0xFFFFFFFF) else speed


def qos(name: str) -> Dict[str, Any]:
    """Trust mode and flow-controlled priorities of a Mellanox interface; empty without ``mlnx_qos``."""
    try:
        program = find_program("mlnx_qos")
        done = subprocess.run(
            [program, "-i", name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_qos(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else {}


def parse_qos(text: str) -> Dict[str, Any]:
    """Parse the output of ``mlnx_qos -i IF`` into ``{"trust": "dscp", "pfc": [3]}``; leaves out what is missing."""
    found = {}  # type: Dict[str, Any]
    trust = re.search(r"Priority trust state:\s*(\w+)", text)
    if trust:
        found["trust"] = trust.group(1).lower()
    enabled = re.search(r"PFC configuration:.*?enabled((?:\s+[01])+)", text, re.DOTALL)
    if enabled:
        found["pfc"] = [priority for priority, on in enumerate(enabled.group(1).split()) if on == "1"]
    return found


class Listener:
    """Listening sockets on one address, one in each port range, which accept connections and close them.

    Raises OSError: the address is not this host's, or no port is free in a range.
    """

    def __init__(self, address: str, ranges: List[List[int]], cancelled: Callable[[], bool], limit_s: float) -> None:
        self._cancelled = cancelled
        self._limit_s = limit_s
        self._sockets = []  # type: List[socket.socket]
        try:
            for first, last in ranges:
                self._sockets.append(_listening_within(address, first, last))
        except OSError:
            self.close()
            raise
        self.ports = [sock.getsockname()[1] for sock in self._sockets]

    def serve(self) -> int:
        """Accept until cancelled or out of time; return the number of connections."""
        accepted, deadline = 0, time.monotonic() + self._limit_s
        selector = selectors.DefaultSelector()
        try:
            for sock in self._sockets:
                selector.register(sock, selectors.EVENT_READ)
            while not self._cancelled() and time.monotonic() < deadline:
                for key, _ in selector.select(0.2):
                    with contextlib.suppress(OSError):  # this one failed, or there is no descriptor just now
                        connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        connection.close()
                        accepted += 1
        finally:
            selector.close()
            self.close()
        return accepted

    def close(self) -> None:
        """Close every socket. Idempotent."""
        for sock in self._sockets:
            sock.close()


def _listening_within(address: str, first: int, last: int) -> socket.socket:
    """Return a listening socket on a port of a range; tries another port if one is in use."""
    for _ in range(PORT_TRIES):
        try:
            return _listening(address, random.randint(first, last))  # noqa: S311 - not a secret
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no free port found from %d to %d" % (first, last))


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def connect(targets: List[Dict[str, Any]], source: Optional[str], timeout_s: float) -> List[Dict[str, Any]]:
    """Try to connect to all targets (``address``, ``port``) at the same time.

    Returns:
        In the targets' order: ``{"ok", "error", "elapsed_ms"}``; the error is ``refused``, ``timeout`` (dropped on
        the way) or the system's error.
    """
    outcomes = [{"ok": False, "error": "timeout", "elapsed_ms": None} for _ in targets]  # type: List[Dict[str, Any]]
    selector = selectors.DefaultSelector()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(selector.close)
        waiting = 0
        for outcome, target in zip(outcomes, targets):
            try:
                sock = stack.enter_context(_connecting(target, source))
            except OSError as error:
                outcome["error"] = error.strerror or str(error)
                continue
            selector.register(sock, selectors.EVENT_WRITE, outcome)
            waiting += 1
        while waiting:
            left_s = started + timeout_s - time.monotonic()
            ready = selector.select(max(0.0, left_s))  # looked at once more when time is up: this host may be slow
            for key, _ in ready:
                _settle(key.fileobj, key.data, started)
                selector.unregister(key.fileobj)
                waiting -= 1
            if left_s <= 0 and not ready:
                break
    return outcomes


def _connecting(target: Dict[str, Any], source: Optional[str]) -> socket.socket:
    address = str(target["address"])
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if source:
            sock.bind((source, 0))
        with contextlib.suppress(BlockingIOError):
            sock.connect((address, int(target["port"])))
    except OSError:
        sock.close()
        raise
    return sock


def _settle(sock: Any, outcome: Dict[str, Any], started: float) -> None:
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        outcome["error"] = "refused" if code == errno.ECONNREFUSED else os.strerror(code)
        return
    outcome.update(ok=True, error="", elapsed_ms=round((time.monotonic() - started) * 1000, 1))
