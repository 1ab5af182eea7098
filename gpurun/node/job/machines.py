"""Names of other machines that only this host's ``/etc/hosts`` knows."""

import ipaddress
import re
from typing import List

MOST = 256
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")


def known(path: str = "/etc/hosts") -> List[List[str]]:
    """Return name and address of other machines in the file, in its order, at most `MOST`.

    A container on the host's network has the host's file, but not if Docker gets any ``--add-host``.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 20).splitlines()
    except OSError:
        return []
    found: List[List[str]] = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        if _is_other(address):
            found += [[name, address] for name in names if _NAME.match(name)]
    return found[:MOST]


def _is_other(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    is_own = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local
    return not is_own and "%" not in address
