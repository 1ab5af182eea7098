"""Facts of this host from /sys and its interfaces, and an id that stays the same whatever an inventory calls it."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import ipaddress
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
from typing import Any, Callable, Dict, List, Optional, Union

# Read RDMA devices, PCI paths and driver state from sysfs.


_PCI = re.compile(r"(pci)?[0-9a-f]{4,}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-9a-f])?\Z")
# Counters that only rise when something goes wrong on the wire.
COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")


def read_sysfs(*parts: str) -> Optional[str]:
    """A file's text without surrounding blanks; None if it is absent or the kernel refuses (an empty GID: EINVAL)."""
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 16).strip()
    except OSError:
        return None


def sysfs_names(*parts: str) -> List[str]:
    """A folder's entries in natural order (mlx5_2 before mlx5_10); empty if there is no such folder."""
    try:
        entries = os.listdir(os.path.join(*parts))
    except OSError:
        return []
    return sorted(entries, key=_natural)


def _natural(name: str) -> "List[Union[int, str]]":
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def hcas(sysfs: str) -> List[Dict[str, Any]]:
    """Every RDMA device, as `gpurun.facts.Hca`."""
    nodes = uverbs(sysfs)
    return [_hca(sysfs, name, nodes.get(name)) for name in sysfs_names(sysfs, "class/infiniband")]


def uverbs(sysfs: str) -> Dict[str, str]:
    """Return device name → its device file in /dev/infiniband."""
    found = {}
    for node in sysfs_names(sysfs, "class/infiniband_verbs"):
        device = read_sysfs(sysfs, "class/infiniband_verbs", node, "ibdev")
        if device:
            found[device] = node
    return found


def port_states(sysfs: str) -> Dict[str, str]:
    """Return the state of each port of each RDMA device, such as ``{"mlx5_0 port 1": "ACTIVE"}``; at most 64."""
    found: Dict[str, str] = {}
    for name in sysfs_names(sysfs, "class/infiniband")[:64]:
        folder = os.path.join(sysfs, "class/infiniband", name, "ports")
        for port in sysfs_names(folder):
            if port.isdigit() and len(found) < 64:
                found["%s port %s" % (name[:64], port[:4])] = _after_colon(read_sysfs(folder, port, "state"))[:40]
    return found


def _hca(sysfs: str, name: str, node: Optional[str]) -> Dict[str, Any]:
    folder = os.path.join(sysfs, "class/infiniband", name)
    return {
        "name": name,
        "ports": [_port(folder, port) for port in sysfs_names(folder, "ports") if port.isdigit()],
        "pci_path": pci_path(sysfs, os.path.join(folder, "device")),
        "numa_node": numa_node(os.path.join(folder, "device")),
        "uverbs": node,
        "firmware": read_sysfs(folder, "fw_ver") or "",
        "board": read_sysfs(folder, "board_id") or "",
        "interfaces": sysfs_names(folder, "device/net"),
    }


def _port(folder: str, port: str) -> Dict[str, Any]:
    here = os.path.join(folder, "ports", port)
    counters = {name: read_sysfs(here, "counters", name) for name in COUNTERS}
    return {
        "number": int(port),
        "state": _after_colon(read_sysfs(here, "state")),
        "physical_state": _after_colon(read_sysfs(here, "phys_state")),
        "link_layer": read_sysfs(here, "link_layer") or "",
        "rate_gbit": _rate(read_sysfs(here, "rate")),
        "gids": _gids(here),
        "counters": {name: int(value) for name, value in counters.items() if value and value.isdigit()},
    }


def _gids(port: str) -> List[Dict[str, Any]]:
    found = []
    for index in sysfs_names(port, "gids"):
        address = read_sysfs(port, "gids", index)
        if not index.isdigit() or not address or not set(address) - set("0:"):
            continue
        found.append(
            {
                "index": int(index),
                "address": compressed(address),
                "kind": read_sysfs(port, "gid_attrs/types", index) or "",
                "interface": read_sysfs(port, "gid_attrs/ndevs", index) or None,
            }
        )
    return found


def compressed(address: str) -> str:
    """Return a GID in short form: ``::ffff:10.0.0.1``, ``fe80::1``. Returns a text that is not an address as it is."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return "::ffff:%s" % parsed.ipv4_mapped if parsed.ipv4_mapped else parsed.compressed


def pci_path(sysfs: str, device: str) -> List[str]:
    """PCI addresses from the host bridge down to the device behind a sysfs link; empty if it is not on PCI."""
    real = os.path.realpath(device)
    inside = os.path.relpath(real, os.path.realpath(sysfs)).split(os.sep)
    return [part for part in inside if _PCI.match(part)]


def numa_node(device: str) -> Optional[int]:
    """Return the NUMA node; None if the machine has none or does not say (-1)."""
    text = read_sysfs(device, "numa_node")
    return int(text) if text and text.isdigit() else None


def gpu_places(sysfs: str, gpus: List[Dict[str, Any]]) -> None:
    """Add each GPU's PCI path and NUMA node."""
    for gpu in gpus:
        device = os.path.join(sysfs, "bus/pci/devices", gpu["pci_bus"] or "none")
        gpu["pci_path"] = pci_path(sysfs, device)
        gpu["numa_node"] = numa_node(device)


def peermem(sysfs: str) -> str:
    """The version of the module for GPUDirect RDMA; empty if it is not loaded."""
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if os.path.isdir(os.path.join(sysfs, "module", module)):
            return read_sysfs(sysfs, "module", module, "version") or "loaded"
    return ""


def dmabuf(proc: str, kernel: str) -> Optional[bool]:
    """Return whether GPUDirect works without that module: open GPU kernel modules and Linux 5.12 or newer.

    Source: NVIDIA GPU Operator documentation, "GPUDirect RDMA", DMA-BUF prerequisites. None without a driver.
    """
    version = read_sysfs(proc, "driver/nvidia/version")
    if not version:
        return None
    numbers = [int(part) for part in re.findall(r"\d+", kernel)[:2]]
    return "Open Kernel Module" in version and numbers >= [5, 12]


def _after_colon(text: Optional[str]) -> str:
    """``4: ACTIVE`` → ``ACTIVE``."""
    return (text or "").partition(":")[2].strip()


def _rate(text: Optional[str]) -> Optional[float]:
    """``100 Gb/sec (4X EDR)`` → 100.0."""
    match = re.match(r"([0-9.]+) Gb/sec", text or "")
    return float(match.group(1)) if match else None


# Network interfaces, and test connections between hosts.


SIOCETHTOOL, ETHTOOL_GSET = 0x8946, 0x00000001
PORT_TRIES = 20
SKIPPED = re.compile(r"(lo|docker\d+|br-[0-9a-f]{12}|veth[0-9a-f]+)\Z")
"""Interfaces no job ever uses: loopback, Docker's own bridges and their ends."""


def nics(sysfs: str, documents: List[Dict[str, Any]], speed: Callable[[str], Optional[int]]) -> List[Dict[str, Any]]:
    """Return interfaces, as `gpurun.facts.Nic`, from the output of ``ip -json address`` and sysfs."""
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
                "numa_node": numa_node(device),
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


def try_connections(targets: List[Dict[str, Any]], source: Optional[str], timeout_s: float) -> List[Dict[str, Any]]:
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


MACHINE_ID = re.compile(r"[0-9a-f]{32}\Z")
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")
NO_MACS = ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff")
PERMANENT = "0"  # NET_ADDR_PERM in linux/netdevice.h


def machine_id(sysfs: str, etc: str) -> str:
    """Return 32 hex digits for this machine; empty if it does not say both parts.

    The parts are ``machine-id``, which copies of one disk image share, and the lowest MAC address of a network device.
    Returns a hash of them, because machine-id(5) asks programs not to show it to others.
    """
    known, mac = read_sysfs(etc, "machine-id") or "", lowest_mac(sysfs)
    if not MACHINE_ID.match(known) or mac is None:
        return ""
    return hashlib.sha256(("gpurun machine %s %s" % (known, mac)).encode()).hexdigest()[:32]


def lowest_mac(sysfs: str) -> Optional[str]:
    """Return the lowest permanent MAC address of the network devices in this machine; None if there is none.

    Leaves out virtual interfaces, virtual functions of a card, and USB devices: the one of a management controller has
    the same address in many machines.
    """
    found: List[str] = []
    for name in sysfs_names(sysfs, "class/net"):
        folder = os.path.join(sysfs, "class/net", name)
        device = os.path.join(folder, "device")
        if not os.path.isdir(device) or os.path.lexists(os.path.join(device, "physfn")):
            continue
        if os.path.basename(os.path.realpath(os.path.join(device, "subsystem"))) == "usb":
            continue
        mac = _permanent(folder)
        if MAC.match(mac) and mac not in NO_MACS:
            found.append(mac)
    return min(found) if found else None


def _permanent(folder: str) -> str:
    """Return a device's permanent address; empty if it is not known. A bond gives its members another address."""
    before_bond = read_sysfs(folder, "bonding_slave/perm_hwaddr")
    if before_bond is not None:
        return before_bond.lower()
    if read_sysfs(folder, "addr_assign_type") != PERMANENT:
        return ""
    return (read_sysfs(folder, "address") or "").lower()
