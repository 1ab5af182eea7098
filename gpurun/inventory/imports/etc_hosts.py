"""Import ``/etc/hosts``: an address, a name and its aliases on each line. Source: hosts(5)."""

from __future__ import annotations

import ipaddress
import re

from gpurun.inventory.imports.draft import Draft
from gpurun.quantities.counts import count

_OF_EVERY_MACHINE = re.compile(
    r"localhost.*|ip6-.*|broadcasthost|.*\.localdomain|(host|gateway|kubernetes)\.docker\..*"
)


def read(text: str, draft: Draft, file: str) -> None:
    """Fill a draft. The first name on a line is the host's; a host with several addresses keeps the first one."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) < 2 or not is_one(words[0]):
            continue
        where = f"{file}:{number}"
        address, name = words[0], words[1]
        if not _is_of_hosts(address) or _OF_EVERY_MACHINE.fullmatch(name):
            continue
        if name in draft.values:
            draft.leave(f"{address}: gpurun uses only the first address of {name}", where)
        elif draft.host(name, where):
            draft.put(name, "address", address, where)
            if len(words) > 2:
                draft.leave(f"other names: {', '.join(words[2:])}", where, name)
    draft.leave_out_by_name(file)
    draft.took.append(count(len(draft.values), "host with its address", "hosts with their addresses"))


def is_one(word: str) -> bool:
    """Return whether a word is an IP address."""
    try:
        return bool(ipaddress.ip_address(word.partition("%")[0]))
    except ValueError:
        return False


def _is_of_hosts(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_multicast or found.is_unspecified or found.is_reserved)
