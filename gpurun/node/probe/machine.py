"""What a machine calls itself: an id that stays the same whatever an inventory calls the host."""

import hashlib
import os
import re
from typing import List, Optional

from gpurun.node.probe import sysfs_facts

MACHINE_ID = re.compile(r"[0-9a-f]{32}\Z")
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")
NO_MACS = ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff")
PERMANENT = "0"  # NET_ADDR_PERM in linux/netdevice.h


def machine_id(sysfs: str, etc: str) -> str:
    """Return 32 hex digits for this machine; empty if it does not say both parts.

    The parts are ``machine-id``, which copies of one disk image share, and the lowest MAC address of a network device.
    Returns a hash of them, because machine-id(5) asks programs not to show it to others.
    """
    known, mac = sysfs_facts.read(etc, "machine-id") or "", lowest_mac(sysfs)
    if not MACHINE_ID.match(known) or mac is None:
        return ""
    return hashlib.sha256(("gpurun machine %s %s" % (known, mac)).encode()).hexdigest()[:32]


def lowest_mac(sysfs: str) -> Optional[str]:
    """Return the lowest permanent MAC address of the network devices in this machine; None if there is none.

    Leaves out virtual interfaces, virtual functions of a card, and USB devices: the one of a management controller has
    the same address in many machines.
    """
    found: List[str] = []
    for name in sysfs_facts.names(sysfs, "class/net"):
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
    before_bond = sysfs_facts.read(folder, "bonding_slave/perm_hwaddr")
    if before_bond is not None:
        return before_bond.lower()
    if sysfs_facts.read(folder, "addr_assign_type") != PERMANENT:
        return ""
    return (sysfs_facts.read(folder, "address") or "").lower()
