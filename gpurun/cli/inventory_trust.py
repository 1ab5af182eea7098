"""``gpurun inventory trust``: show host keys and known_hosts entries, and trust a key only if a person agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.inventory_options import cluster
from gpurun.cli.options import HostsArgument, InventoryOption, JsonOption, YesOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.cli.values import TIME
from gpurun.errors import BadInput, HostFailure
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpurun.leases.cluster import Cluster
    from gpurun.remote.ssh_config import Route
    from gpurun.remote.trust import Offer, OfferedKey

REFUSED = HostFailure.exit_code


def trust(
    hosts: HostsArgument,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also trust keys that differ from the keys in known_hosts.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", click_type=TIME, help="How long gpurun waits for a host's answer.", show_default="5s"
        ),
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Fetch host keys, show fingerprints, and write new keys to known_hosts. The exit code is 4 if a key is refused.

    On the way to a host, gpurun first fetches the keys of the jump hosts. HOSTS may also name a jump host that is not
    in the inventory.

    gpurun inventory trust @rack:r1
    """
    from gpurun.remote.trust import accept, known_as, offers, rounds

    found = cluster(inventory)
    offered: list[Offer] = []
    behind: list[str] = []
    untrusted: set[str] = set()
    written = 0
    for some in rounds(_routes(found, hosts)):
        ways = {route.name: [hop.name for hop in route.hops[:-1] if known_as(hop) in untrusted] for route in some}
        behind += [
            f"{name}: gpurun did not ask for the host key, because the jump host {way[0]} is not trusted"
            for name, way in ways.items()
            if way
        ]
        asked = [route for route in some if not ways[route.name]]
        now = offers(asked, ssh_config=found.inventory.ssh_config, timeout_s=timeout_s)
        if not as_json:
            for offer in now:
                _print(offer)
        wanted = [offer for offer in now if _to_write(offer, replace)]
        if wanted and not yes:
            _ask(wanted)
        written += accept(wanted, replace=replace)
        offered += now
        untrusted |= {offer.name for offer in now if _refused(offer, replace)}
        untrusted |= {known_as(route) for route in some if ways[route.name]}
    refused = [offer for offer in offered if _refused(offer, replace)]
    if as_json:
        print_json({"hosts": [_json(offer) for offer in offered], "keys_written": written})
    _report(written, offered, refused)
    for text in behind:
        say(printable(text))
    if refused or behind:
        raise typer.Exit(REFUSED)


def _routes(found: Cluster, hosts: str) -> list[Route]:
    """Return the ways to the chosen hosts.

    Raises:
        BadInput: the text names neither hosts of the inventory nor jump hosts on the ways to them; or the OpenSSH
            configuration is wrong.
    """
    from gpurun.remote.ssh_config import resolve_all
    from gpurun.remote.target import target_of

    try:
        chosen = [target_of(host, found.inventory) for host in found.choose(hosts)]
    except BadInput:
        ways = resolve_all([target_of(host, found.inventory) for host in found.inventory.hosts]).values()
        hops = {hop.name: hop for way in ways if not isinstance(way, BadInput) for hop in way.hops}
        if not all(name in hops for name in hosts.split(",")):
            raise
        return [hops[name] for name in dict.fromkeys(hosts.split(","))]
    routes = []
    for route in resolve_all(chosen).values():
        if isinstance(route, BadInput):
            raise route
        routes.append(route)
    return routes


def _ask(wanted: Sequence[Offer]) -> None:
    from gpurun.inventory.hostset import fold

    names = fold(offer.host for offer in wanted)
    agree(
        f"Trust {names}?",
        "gpurun cannot ask you whether the fingerprints are right, because stdin is not a terminal",
        "--yes trusts the keys without a question",
    )


def _to_write(offer: Offer, replace: bool) -> bool:
    """Return whether a yes would write a key of this host."""
    if _refused(offer, replace):
        return False
    return any(key.state in ("new", "changed") for key in offer.keys)


def _refused(offer: Offer, replace: bool) -> bool:
    return offer.state in ("revoked", "unreachable") or (offer.state == "changed" and not replace)


def _print(offer: Offer) -> None:
    if not offer.keys:
        typer.echo(f"{offer.host} ({offer.name}): no answer")
    for key in offer.keys:
        typer.echo(printable(f"{offer.host} ({offer.name}): {key.kind} {key.fingerprint} {_said(key)}"))


def _said(key: OfferedKey) -> str:
    if key.state == "changed":
        return f"CHANGED: known_hosts has {' and '.join(key.known)}"
    return key.state


def _json(offer: Offer) -> dict[str, Any]:
    keys = [
        {"type": k.kind, "fingerprint": k.fingerprint, "state": k.state, "known": list(k.known)} for k in offer.keys
    ]
    return {"host": offer.host, "name": offer.name, "known_hosts": str(offer.file), "state": offer.state, "keys": keys}


def _report(written: int, offered: Sequence[Offer], refused: Sequence[Offer]) -> None:
    from gpurun.inventory.hostset import fold

    if written:
        files = sorted({str(offer.file) for offer in offered})
        say(f"{count(written, 'key')} written to {', '.join(files)}")
    elif not refused:
        say("known_hosts already has every key")
    hints = {
        "changed": "its key differs from the key in known_hosts; if you know why, --replace trusts the new key",
        "revoked": "its key is marked as revoked in known_hosts",
        "unreachable": "no answer",
    }
    for state, hint in hints.items():
        names = [offer.host for offer in refused if offer.state == state]
        if names:
            say(f"{fold(names)}: not trusted: {hint}")
