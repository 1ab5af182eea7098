"""``gpurun inventory trust``: show host keys and known_hosts entries, and trust a key only if a person agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.inventory_options import cluster
from gpurun.cli.options import HostsArgument, InventoryOption, JsonOption, YesOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput, HostFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpurun.remote.trust import Offer, OfferedKey

REFUSED = HostFailure.exit_code


def trust(
    hosts: HostsArgument,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    replace: Annotated[bool, typer.Option("--replace", help="Also trust keys that replace known ones.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds a host has to answer.")] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Fetch host keys, show their fingerprints, write new keys to known_hosts. Exits 4 if a key is refused."""
    from gpurun.inventory.hostset import fold
    from gpurun.remote.ssh_config import resolve_all
    from gpurun.remote.target import target_of
    from gpurun.remote.trust import accept, offers

    found = cluster(inventory)
    chosen = found.choose(hosts)
    routes = []
    for route in resolve_all([target_of(host, found.inventory) for host in chosen]).values():
        if isinstance(route, BadInput):
            raise route
        routes.append(route)
    offered = offers(routes, ssh_config=found.inventory.ssh_config, timeout_s=timeout)
    if not as_json:
        for offer in offered:
            _print(offer)
    wanted = [offer for offer in offered if _to_write(offer, replace)]
    if wanted and not yes:
        names = fold(offer.host for offer in wanted)
        agree(f"Trust {names}?", "nobody is there to compare the fingerprints", "--yes trusts them")
    written = accept(wanted, replace=replace)
    refused = [offer for offer in offered if _refused(offer, replace)]
    if as_json:
        print_json({"hosts": [_json(offer) for offer in offered], "keys_written": written})
    _report(written, offered, refused)
    if refused:
        raise typer.Exit(REFUSED)


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
        say(f"{written} keys written to {', '.join(files)}")
    elif not refused:
        say("every key is known already")
    hints = {
        "changed": "its key is not the one known_hosts has; if you know why, --replace trusts the new one",
        "revoked": "its key is marked as revoked in known_hosts",
        "unreachable": "no answer",
    }
    for state, hint in hints.items():
        names = [offer.host for offer in refused if offer.state == state]
        if names:
            say(f"{fold(names)}: not trusted: {hint}")
