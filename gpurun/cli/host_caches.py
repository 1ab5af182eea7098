"""``gpurun du --caches`` and ``gpurun prune --caches``: the user's caches of models and kernels on hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from gpurun.cli.inventory_options import cluster
from gpurun.cli.printing import print_json, printable, say, size_text
from gpurun.errors import BadInput, GpurunError, HostFailure

if TYPE_CHECKING:
    from gpurun.data.caches import HostCaches
    from gpurun.leases.cluster import Cluster


def show_caches(hosts: str | None, inventory: str | None, *, as_json: bool) -> None:
    """Show what the user's caches take on hosts. The exit code is 4 if a host failed."""
    from gpurun.cli.ship import fleet_of
    from gpurun.data.caches import measure

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        caches, failed = measure(fleet, names, _owner(found))
    if as_json:
        print_json({"caches": [each.as_json() for each in caches], "failed": _messages(failed)})
    else:
        for each in caches:
            typer.echo(f"{size_text(each.bytes):>10}  {each.host}{_use(each)}")
        typer.echo(f"{size_text(sum(each.bytes for each in caches)):>10}  in all")
    _end(failed)


@dataclass(frozen=True)
class CacheWish:
    """What to prune of the user's caches.

    Attributes:
        below_mib: how much may stay on each host; None = what the inventory says, or nothing.
        for_jobs: there are conditions that only jobs can meet.
    """

    hosts: str | None
    inventory: str | None
    below_mib: int | None
    for_jobs: bool
    dry_run: bool
    yes: bool


def prune_caches(wish: CacheWish, *, as_json: bool) -> None:
    """Remove what was used least recently from the user's caches. The exit code is 4 if a host failed.

    Raises:
        BadInput: the wish is one for jobs.
    """
    from gpurun.cli.agreement import agree
    from gpurun.cli.ship import fleet_of
    from gpurun.data.caches import measure, trim

    if wish.for_jobs:
        raise BadInput(
            "caches do not belong to jobs: leave out all options about jobs",
            where="--caches",
            hint="run: gpurun prune --caches --keep-below SIZE",
        )
    found = cluster(wish.inventory)
    chosen, dry_run = found.choose(wish.hosts), wish.dry_run
    limits = {
        host.name: ((host.cache_quota_mib or 0) if wish.below_mib is None else wish.below_mib) << 20 for host in chosen
    }
    owner = _owner(found)
    with fleet_of(found, list(limits)) as fleet:
        caches, failed = measure(fleet, list(limits), owner)
        beyond = [each for each in caches if each.bytes > limits[each.host]]
        if not as_json:
            _print_beyond(beyond, limits)
        if beyond and not dry_run:
            if not wish.yes:
                agree(
                    "Remove the least recently used files?",
                    "gpurun removed nothing, because stdin is not a terminal, so gpurun cannot ask you",
                    "give --yes to prune without a question",
                )  # fmt: skip
            caches, more = trim(fleet, {each.host: limits[each.host] for each in beyond}, owner)
            failed = {**failed, **more}
    if as_json:
        print_json({"dry_run": dry_run, "caches": [each.as_json() for each in caches], "failed": _messages(failed)})
    elif beyond and not dry_run:
        _print_done(caches)
    _end(failed)


def _owner(found: Cluster) -> str:
    from gpurun.launch.caches import owner_of
    from gpurun.node.gpu.claim_rules import Claimant
    from gpurun.state.identity import state_id

    return owner_of(Claimant(state=state_id(found.home), uid=os.getuid()))


def _use(each: HostCaches) -> str:
    return f"  used by {printable(', '.join(each.jobs))}" if each.jobs else ""


def _print_beyond(beyond: Sequence[HostCaches], limits: Mapping[str, int]) -> None:
    for each in beyond:
        typer.echo(
            f"{each.host}: the caches use {size_text(each.bytes)}, and may use "
            f"{size_text(limits[each.host])}{_use(each)}"
        )
    if not beyond:
        typer.echo("nothing to remove")


def _print_done(caches: Sequence[HostCaches]) -> None:
    for each in caches:
        if each.jobs:
            say(f"gpurun keeps the caches on {each.host}, because jobs use them: {printable(', '.join(each.jobs))}")
        for stuck in each.stuck:
            say(f"not removed on {each.host}: {printable(stuck)}")
    say(f"removed {size_text(sum(each.freed for each in caches))}")


def _messages(failed: Mapping[str, GpurunError]) -> dict[str, str]:
    return {host: error.message for host, error in failed.items()}


def _end(failed: Mapping[str, GpurunError]) -> None:
    from gpurun.cli.ship import say_failures

    say_failures(failed)
    if failed:
        raise typer.Exit(HostFailure.exit_code)
