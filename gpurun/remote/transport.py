"""Which transport reaches a host. Pure.

Paramiko offers keys of files and of the ssh-agent, and nothing else. The machine's own ``ssh`` can also use a
connection that is open already, Kerberos tickets, FIDO keys and PKCS#11 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpurun.remote.ssh_config import Route
from gpurun.remote.target import TransportName

_METHODS = {"gssapiauthentication": "gssapi-with-mic", "hostbasedauthentication": "hostbased"}
"""Keyword of ssh_config → the method of authentication that it lets ``ssh`` use (RFC 4462, RFC 4252)."""


@dataclass(frozen=True)
class Proofs:
    """What there is to log in with, on the way to one host.

    Attributes:
        masters: hops with an open connection to share, and its socket.
        plain: whether Paramiko has a key that it could offer to each hop without such a connection.
        hardware: whether a key file stands for a FIDO key.
    """

    masters: Mapping[Route, str]
    plain: bool
    hardware: bool


@dataclass(frozen=True)
class Choice:
    """How a host is reached.

    Attributes:
        first: the transport to try.
        then: methods of authentication for which ``ssh`` is tried too, if the host wants one of them and refused the
            keys; ``publickey`` stands for keys that only ``ssh`` can use.
    """

    first: TransportName
    then: frozenset[str] = frozenset()

    def asks_ssh(self, wanted: Collection[str]) -> bool:
        """Whether ``ssh`` may succeed where Paramiko was refused by a host that wants these methods."""
        return bool(self.then & set(wanted))


def choose(route: Route, proofs: Proofs) -> Choice:
    """The inventory decides; else an open connection; else Paramiko, wherever it has a key to offer."""
    if route.target.ssh is not None:
        return Choice(route.target.ssh)
    if proofs.masters:
        return Choice("system")
    keywords = {keyword for hop in route.hops for keyword in hop.beyond_keys}
    others = {_METHODS.get(keyword, "publickey") for keyword in keywords}
    if proofs.hardware:
        others.add("publickey")
    if others and not (proofs.plain and all(hop.public_keys for hop in route.hops)):
        return Choice("system")
    return Choice("paramiko", frozenset(others))
