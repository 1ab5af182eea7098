"""Connect to the first address of a host that answers.

A name may have several addresses, and one of them may drop packets, such as an IPv6 address without a route. So gpurun
tries the next address after a moment, while the first may still answer (RFC 8305, "Happy Eyeballs").
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurun.errors import HostUnreachable

if TYPE_CHECKING:
    from gpurun.remote.session import Attempt
    from gpurun.remote.ssh_config import Route

NEXT_ADDRESS_S = 1.0
"""TCP repeats its first packet after 1 s, so an address that has not answered by then has probably dropped it."""


class Address(NamedTuple):
    """One result of getaddrinfo(3)."""

    family: int
    kind: int
    protocol: int
    name: str
    address: Any


def addresses_of(route: Route) -> list[Address]:
    """Return the addresses of a route's host, families in turn, in the resolver's order otherwise.

    Raises:
        HostUnreachable: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(route.hostname, route.port, route.family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        hint = "correct DNS, /etc/hosts, or the address in the inventory or in ssh_config"
        raise HostUnreachable(
            f"the name {route.hostname!r} cannot be resolved: {error}", host=route.name, hint=hint
        ) from None
    return in_turn(Address(*each) for each in found)


def in_turn(addresses: Iterable[Address]) -> list[Address]:
    """Return addresses with their families in turn, the first address first."""
    by_family: dict[int, list[Address]] = {}
    for each in addresses:
        by_family.setdefault(each.family, []).append(each)
    return [each for each in chain(*zip_longest(*by_family.values())) if each is not None]


def dial(addresses: Sequence[Address], attempt: Attempt, bind_address: str | None = None) -> socket.socket:
    """Return a connection to the first address that accepts one within `attempt.connect_left_s`.

    Raises:
        OSError: the last failure; TimeoutError if an address did not answer at all.
    """
    waiting = deque(addresses)
    trying: list[socket.socket] = []
    failure: OSError = TimeoutError()
    until_s = time.monotonic() + attempt.connect_left_s
    next_s = 0.0
    try:
        while (waiting or trying) and (now_s := time.monotonic()) < until_s:
            if waiting and (not trying or now_s >= next_s):
                next_s = now_s + NEXT_ADDRESS_S
                try:
                    trying.append(_begun(waiting.popleft(), attempt, bind_address))
                except OSError as error:
                    failure = error
                continue
            for sock in _settled(trying, min(until_s, next_s if waiting else until_s) - now_s):
                trying.remove(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                failure = OSError(number, os.strerror(number))
                if not number or isinstance(failure, ConnectionError):
                    attempt.answered()
                if not number:
                    sock.setblocking(True)
                    return sock
                sock.close()
    finally:
        for sock in trying:
            sock.close()
    raise TimeoutError if trying else failure


def _begun(address: Address, attempt: Attempt, bind_address: str | None) -> socket.socket:
    """Return a socket that connects to an address. Raises OSError: it cannot."""
    sock = socket.socket(address.family, address.kind, address.protocol)
    attempt.opened(sock.close)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if bind_address:
            sock.bind((bind_address, 0))
        sock.setblocking(False)
        attempt.asks()
        with suppress(BlockingIOError):
            sock.connect(address.address)
    except OSError as error:
        if isinstance(error, ConnectionError):
            attempt.answered()
        sock.close()
        raise
    return sock


def _settled(trying: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Return the sockets that are connected or have failed; wait for the first for a limited time."""
    by_number = {sock.fileno(): sock for sock in trying}
    poller = select.poll()
    for number in by_number:
        if number < 0:
            raise OSError("gpurun gave up this connection attempt")
        poller.register(number, select.POLLOUT)
    return [by_number[number] for number, _ in poller.poll(max(0.0, timeout_s) * 1000 + 1)]
