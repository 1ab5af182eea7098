"""Check that hosts can resolve each other's names. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpurun.doctor.findings import Finding, Severity
from gpurun.doctor.host_checks import plain_addresses
from gpurun.facts.hardware import Hardware
from gpurun.inventory.hostset import fold

NEIGHBOURS = 31
"""Each host looks up this many others, those that follow it in the list."""

Lookups = Mapping[str, Mapping[str, Sequence[str] | None]]
"""Host → name → addresses; an empty list if the name does not resolve, None if there was no answer in time."""


def wanted(hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return host → the names that it should look up."""
    doubled = (*hosts, *hosts)
    reach = min(NEIGHBOURS, len(hosts) - 1)
    return {host: doubled[at + 1 : at + 1 + reach] for at, host in enumerate(hosts)}


def judge(lookups: Lookups, found: Mapping[str, Hardware], interface: str) -> Iterator[Finding]:
    """Report names that do not resolve, or resolve to an address that their host does not have.

    gpurun gives its containers every name of the gang (``--add-host``), so only programs that users start by hand have
    a problem. A name that resolves to another interface of the right host is common and no problem.
    """
    for host, names in lookups.items():
        unknown = [name for name, addresses in names.items() if addresses is not None and not addresses]
        if unknown:
            whom = fold(unknown) if len(unknown) < len(names) else "any other host's name"
            evidence = f"the host cannot resolve {whom}"
            remedy = "add the hosts of the fabric to /etc/hosts or DNS"
            yield Finding("names", Severity.WARNING, (host,), evidence, remedy)
        for name, addresses in names.items():
            if addresses and name in found:
                yield from _one(host, name, addresses, found[name], interface)


def _one(host: str, name: str, addresses: Sequence[str], target: Hardware, interface: str) -> Iterator[Finding]:
    own = {address for nic in target.nics for address in plain_addresses(nic)}
    if own and not own & set(addresses):
        evidence = f"the host resolves {name} to {', '.join(addresses)}, which {name} does not have"
        yield Finding("names", Severity.WARNING, (host,), evidence, "correct /etc/hosts or DNS")
        return
    nic = target.nic(interface)
    if nic and plain_addresses(nic) and not set(plain_addresses(nic)) & set(addresses):
        evidence = f"{name} resolves to {', '.join(addresses)}, which is not the address of {name} on {interface}"
        yield Finding("names", Severity.NOTE, (host,), evidence)
