"""Choose the transport for a host. Pure.

Paramiko offers only keys from files and from the ssh-agent. The machine's own ``ssh`` can also use an open shared
connection, Kerberos tickets, FIDO keys and PKCS#11 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpurun.remote.ssh_config import Route
from gpurun.remote.target import TransportName

_METHODS = {"gssapiauthentication": "gssapi-with-mic", "hostbasedauthentication": "hostbased"}
"""Keyword of ssh_config → the authentication method that it enables for ``ssh`` (RFC 4462, RFC 4252)."""


@dataclass(frozen=True)
class Proofs:
    """The available credentials for the hops to one host.

    Attributes:
        masters: hops with an open shared connection, and its socket.
        plain: Paramiko has a key to offer to each hop without a shared connection.
        hardware: a key file stands for a FIDO key.
        certified: known_hosts has a certificate authority for some hop, and no key.
    """

    masters: Mapping[Route, str]
    plain: bool
    hardware: bool
    certified: bool = False


@dataclass(frozen=True)
class Choice:
    """The transports for a host.

    Attributes:
        first: the transport to try first.
        then: authentication methods for which gpurun also tries ``ssh``, if the host asks for one of them and refused
            the keys; ``publickey`` stands for keys that only ``ssh`` can use.
    """

    first: TransportName
    then: frozenset[str] = frozenset()

    def asks_ssh(self, wanted: Collection[str]) -> bool:
        """Return True if ``ssh`` may succeed after a host refused Paramiko and asked for these methods."""
        return bool(self.then & set(wanted))


def choose(route: Route, proofs: Proofs) -> Choice:
    """Choose the inventory's transport, else ``ssh`` for a shared connection or a host's certificate, else Paramiko if
    it has a key.
    """
    if route.target.ssh is not None:
        return Choice(route.target.ssh)
    if proofs.masters or proofs.certified:
        return Choice("system")
    keywords = {keyword for hop in route.hops for keyword in hop.beyond_keys}
    others = {_METHODS.get(keyword, "publickey") for keyword in keywords}
    if proofs.hardware:
        others.add("publickey")
    if others and not (proofs.plain and all(hop.public_keys for hop in route.hops)):
        return Choice("system")
    return Choice("paramiko", frozenset(others))
