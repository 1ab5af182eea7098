"""``gpurun ship`` and ``gpurun images``: copy an image to hosts; list and remove copied images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.inventory_options import cluster
from gpurun.cli.options import InventoryOption, JsonOption, SomeHostsArgument, YesOption
from gpurun.cli.printing import duration, print_json, printable, say
from gpurun.cli.values import RATE, TIME
from gpurun.errors import BadInput, GpurunError, HostFailure
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpurun.images.census import Placed
    from gpurun.images.events import ShipEvent, ShipReport
    from gpurun.images.plan import ShipPlan
    from gpurun.leases.cluster import Cluster
    from gpurun.remote.fleet import Fleet

MIB = 1 << 20
FAILED = HostFailure.exit_code


def ship(
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", help="Name or ID of a Docker image on the head, the machine that runs gpurun."),
    ],
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what each host would receive.")] = False,
    rate_limit: Annotated[
        int | None,
        typer.Option(click_type=RATE, help="Maximum send rate of the head and of each host, such as 1gbit."),
    ] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", click_type=TIME, help="Stop the copy after this time.", show_default="6h")
    ] = 6 * 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Copy a Docker image to hosts, or to all hosts if you give no HOSTS. The exit code is 4 if a host failed.

    Each host gets only the image layers that the host lacks. gpurun verifies each layer.

    gpurun ship me/train:1 @rack:r1
    """
    from gpurun.images import ship as shipping

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        if dry_run:
            plan = shipping.plan(
                image, fleet, inventory=found.inventory, hosts=names, docker_host=found.inventory.docker_host
            )
            print_json(plan.as_json()) if as_json else _print_plan(plan)
            return
        view = _ShipView(as_json)
        try:
            report = shipping.ship(
                image, fleet, inventory=found.inventory, hosts=names, docker_host=found.inventory.docker_host,
                progress=view.show, deadline_s=deadline_s, rate_bytes_s=rate_limit / 8 if rate_limit else None,
            )  # fmt: skip
        finally:
            view.close()
    print_json(report.as_json()) if as_json else _print_report(report)
    if report.failed:
        raise typer.Exit(FAILED)


def images(
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove images that no job and no container uses.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the images that gpurun has copied to hosts, or remove unused images. The exit code is 4 if a host failed.

    gpurun images @rack:r1 --prune
    """
    from gpurun.images import census

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        listed = census.placed(fleet, names)
        if prune:
            keep = _wanted(found)
            going = {
                host: [one for one in placed if one.id not in keep and one.present and not (one.used_by or one.needed)]
                for host, placed in listed.ok.items()
            }
            if not yes and any(going.values()):
                _confirm(going)
            listed = census.prune(fleet, names, keep)
    if as_json:
        print_json(
            {
                "pruned" if prune else "images": {
                    host: [one.as_json() for one in placed] for host, placed in listed.ok.items()
                },
                "failed": {host: error.message for host, error in listed.failed.items()},
            }
        )
    else:
        _print_images(listed.ok, removed=prune)
    say_failures(listed.failed)
    if listed.failed:
        raise typer.Exit(FAILED)


def fleet_of(found: Cluster, names: Sequence[str]) -> Fleet:
    """Start agents on these hosts."""
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.target import target_of

    return Fleet.open([target_of(found.inventory.by_name[name], found.inventory) for name in names])


def _wanted(found: Cluster) -> list[str]:
    """Return the IDs, in the head's engine, of images that jobs need which have not ended."""
    from gpurun.images.engine import Engine
    from gpurun.jobs.store import JobStore

    engine, store = Engine(found.inventory.docker_host), JobStore(found.home)
    wanted = []
    for job in store.live_ids():
        try:
            spec = store.get(job).spec()
            wanted.append(spec.image_id or engine.image(spec.image).id)
        except BadInput:
            continue
    return wanted


def _confirm(going: Mapping[str, Sequence[Placed]]) -> None:
    for line in _image_lines(going):
        say(line)
    agree(
        "Remove these images?",
        "gpurun removed nothing, because stdin is not a terminal, so gpurun cannot ask you",
        "give --yes to prune without a question",
    )


class _ShipView:
    """Shows the progress of a ship: bars, a line every 5 s, or JSON lines on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._close: Callable[[], None] = lambda: None
        if as_json:
            self._show: Callable[[dict[str, Any]], None] = json_line
            return
        from gpurun.cli.progress import ShipProgress

        progress = ShipProgress()
        self._show, self._close = progress.show, progress.close

    def show(self, event: ShipEvent) -> None:
        """Show an event."""
        said = event.as_json()
        if event.state in ("receiving", "loading") and event.layers and not self._is_json:
            said["state"] = f"{event.state}, layer {event.layer} of {event.layers}"
        self._show(said)

    @property
    def _is_json(self) -> bool:
        return self._show is json_line

    def close(self) -> None:
        """Remove the bars."""
        self._close()


def json_line(event: dict[str, Any]) -> None:
    """Print an event for scripts on stderr."""
    import json

    say(json.dumps(event))


def _print_report(report: ShipReport) -> None:
    from gpurun.inventory.hostset import fold

    alike: dict[str, list[str]] = {}
    for host in report.hosts:
        if host.state in ("present", "done"):
            said = "already present" if host.state == "present" else f"received {_mib(host.bytes_received)}"
            alike.setdefault(said, []).append(host.host)
    for said, names in alike.items():
        typer.echo(f"{fold(names)}: {said}")
    say_failures(report.failed)
    typer.echo(f"{report.image} ({report.id[7:19]}, {count(report.layers, 'layer')}) in {report.elapsed_s:.1f} s")


def _print_plan(plan: ShipPlan) -> None:
    from gpurun.inventory.hostset import fold

    if plan.present:
        typer.echo(f"{fold(plan.present)}: the image is already present")
    if plan.unnamed:
        typer.echo(f"{fold(plan.unnamed)}: the image is present under another name; gpurun adds the name {plan.image}")
    for layer in plan.layers:
        typer.echo(f"{layer.digest[7:19]}  {_mib(layer.bytes):>10}  to {fold(layer.hosts)}")
    for hops in plan.chains:
        typer.echo(" → ".join(["head", *(hop.host for hop in hops)]) if plan.shape == "chain" else "head → each host")
    typer.echo(f"{plan.image}: {_mib(plan.bytes_missing)} missing, about {duration(plan.expected_s)}")


def _print_images(listed: Mapping[str, Sequence[Placed]], *, removed: bool) -> None:
    lines = _image_lines(listed)
    for line in lines:
        typer.echo(line)
    if not lines:
        typer.echo("nothing to remove" if removed else "gpurun has put no image on these hosts")


def _image_lines(listed: Mapping[str, Sequence[Placed]]) -> list[str]:
    """Return one line for each image, with its hosts."""
    from gpurun.inventory.hostset import fold

    by_image: dict[tuple[str, str, int, str], list[str]] = {}
    for host, placed in listed.items():
        for one in placed:
            idle = "needed by a running gpurun command" if one.needed else "unused"
            use = f"used by {count(len(one.used_by), 'container')}" if one.used_by else idle
            state = "gone" if not one.present else "left by an interrupted copy" if one.temporary else use
            name = ", ".join(one.names) or "<no name>"
            by_image.setdefault((one.id[7:19], printable(name), one.size_bytes, state), []).append(host)
    return [
        f"{ident}  {name:30}  {_mib(size):>10}  {state:24}  {fold(hosts)}"
        for (ident, name, size, state), hosts in sorted(by_image.items(), key=lambda item: item[0][1])
    ]


def say_failures(failed: Mapping[str, GpurunError]) -> None:
    """Report which hosts failed, and why. Hosts that failed in the same way share a line."""
    from gpurun.inventory.hostset import fold
    from gpurun.views.lines import alike

    said = {host: (error.message, error.hint or "") for host, error in failed.items()}
    for hosts, (message, hint) in alike(said, fold):
        say(f"gpurun: {fold(hosts)}: {printable(message)}")
        if hint:
            say(f"  → {printable(hint)}")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
