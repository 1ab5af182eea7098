"""``gpurun ship | images | data``: copy images and data sets to hosts, list them, and remove them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun.cli.cancel import agree
from gpurun.cli.main import Place, lazy_group
from gpurun.cli.options import (
    RATE,
    TIME,
    InventoryOption,
    JsonOption,
    SomeHostsArgument,
    YesOption,
)
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import cluster
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, HostFailure, messages_of
from gpurun.quantities import count, duration, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpurun.content.caches import DataSetShape, HostedSet
    from gpurun.content.images import Placed, PlacedImageShape
    from gpurun.content.ship import ShipEvent, ShipPlan, ShipReport
    from gpurun.content.staging import StageReport
    from gpurun.leases.look import Cluster
    from gpurun.remote.fleet import Fleet


# ``gpurun ship`` and ``gpurun images``: copy an image to hosts; list and remove copied images.


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
    from gpurun.content import ship as shipping

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


class ImagesShape(TypedDict, total=False):
    """Images by host.

    Attributes:
        images: all images on each host; only without `--prune`.
        pruned: the images that gpurun removed from each host; only with `--prune`.
        failed: hosts that failed, with the error.
    """

    images: dict[str, list[PlacedImageShape]]
    pruned: dict[str, list[PlacedImageShape]]
    failed: dict[str, str]


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
    from gpurun.content import images

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        listed = images.placed(fleet, names)
        if prune:
            keep = _wanted(found)
            going = {
                host: [one for one in placed if one.id not in keep and one.present and not (one.used_by or one.needed)]
                for host, placed in listed.ok.items()
            }
            if not yes and any(going.values()):
                _confirm(going)
            listed = images.prune(fleet, names, keep)
    if as_json:
        shown = {host: [one.as_json() for one in placed] for host, placed in listed.ok.items()}
        failed = messages_of(listed.failed)
        print_json(ImagesShape(pruned=shown, failed=failed) if prune else ImagesShape(images=shown, failed=failed))
    else:
        _print_images(listed.ok, removed=prune)
    say_failures(listed.failed)
    if listed.failed:
        raise typer.Exit(FAILED)


def fleet_of(found: Cluster, names: Sequence[str]) -> Fleet:
    """Start agents on these hosts."""
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.route import target_of

    return Fleet.open([target_of(found.inventory.by_name[name], found.inventory) for name in names])


def _wanted(found: Cluster) -> list[str]:
    """Return the IDs, in the head's engine, of images that jobs need which have not ended."""
    from gpurun.content.images import Engine
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
        from gpurun.cli.tables import ShipProgress

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
    from gpurun.inventory.folding import fold

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
    from gpurun.inventory.folding import fold

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
    from gpurun.inventory.folding import fold

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
    from gpurun.inventory.folding import fold
    from gpurun.views.lines import alike

    said = {host: (error.message, error.hint or "") for host, error in failed.items()}
    for hosts, (message, hint) in alike(said, fold):
        say(f"gpurun: {fold(hosts)}: {printable(message)}")
        if hint:
            say(f"  → {printable(hint)}")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


# ``gpurun data``: list data sets on hosts, copy a data set there before a job needs it, remove unused data sets.


COMMANDS = {
    "list": Place("gpurun.cli.content:list_", "Show the data sets on hosts, and their jobs"),
    "stage": Place("gpurun.cli.content:stage", "Copy a data set to hosts"),
    "evict": Place("gpurun.cli.content:evict", "Remove data sets from hosts"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    """Show, copy and remove the data sets that jobs read at /data/NAME."""


class DataListShape(TypedDict):
    """Data sets on hosts."""

    sets: list[DataSetShape]
    failed: dict[str, str]


def list_(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show the data sets on hosts, and the jobs that use each data set. The exit code is 4 if a host failed.

    gpurun data list @rack:r1
    """
    from gpurun.content.caches import census
    from gpurun.content.data import Pins

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        sets, failed = census(fleet, names, Pins(found.home).jobs_by_digest())
    if as_json:
        print_json(DataListShape(sets=[one.as_json() for one in sets], failed=messages_of(failed)))
    else:
        for line in _lines(sets):
            typer.echo(line)
        if not sets and not failed:
            typer.echo("gpurun has put no data on these hosts")
    say_failures(failed)
    if failed:
        raise typer.Exit(HostFailure.exit_code)


def stage(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder to copy: a path on the head, or JOB:outputs/path for a folder in a job's outputs.",
        ),
    ],
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a data set to hosts before a job needs the data. The exit code is 4 if a host failed.

    Without HOSTS, gpurun copies the data set to all hosts.

    gpurun data stage datasets/imagenet @rack:r1
    """
    from gpurun.content.data import Pins
    from gpurun.content.staging import Staging
    from gpurun.content.staging import stage as bring
    from gpurun.documents.convert import convert
    from gpurun.jobs.recipe_keys import FIELDS
    from gpurun.jobs.recipe_values import sources_below
    from gpurun.supervisor.start import quotas_of

    kind = FIELDS["data"].item
    assert kind is not None
    meant = convert(source, kind, "SOURCE")
    if meant.kind == "host":
        raise BadInput("the folder is already on the hosts (host:/path), so gpurun has nothing to copy", where=source)
    found = cluster(inventory)
    (pinned,) = Pins(found.home).pin(sources_below(Path.cwd(), {"": meant}).values()).values()
    names = [host.name for host in found.choose(hosts)]
    view = _StageView(source, json_line if as_json else None)
    with fleet_of(found, names) as fleet:
        try:
            assert pinned.digest is not None
            how = Staging(
                fleet, found.inventory, quotas=quotas_of(found.inventory), keep=Pins(found.home).wanted_digests(),
                progress=view.show,
            )  # fmt: skip
            report = bring(pinned.digest, Pins(found.home).as_pinned(pinned), names, how)
        finally:
            view.close()
    print_json(report.as_json()) if as_json else _print_report_of_data(report)
    say_failures({**report.bad_copies, **report.failed})
    if report.failed:
        raise typer.Exit(HostFailure.exit_code)


class EvictShape(TypedDict):
    """The data sets that gpurun removed.

    Attributes:
        evicted: each data set's digest, with the hosts that removed the data set.
        kept: each data set's digest, with each host that keeps the data set, and the reason.
    """

    evicted: Mapping[str, Sequence[str]]
    kept: Mapping[str, Mapping[str, str]]
    failed: dict[str, str]


def evict(
    digests: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIGEST]…", help="Digests of data sets, from `gpurun data list`.", show_default=False),
    ] = None,
    unused: Annotated[
        bool, typer.Option("--unused", help="Remove all data sets that no queued or running job needs.")
    ] = False,
    hosts: Annotated[
        str | None, typer.Option("--host", metavar="HOSTS", help="Remove data sets only from these hosts.")
    ] = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove data sets from hosts. gpurun keeps each data set that a job needs. The exit code is 4 if a host failed.

    gpurun data evict --unused --host @rack:r1
    """
    from gpurun.cli.cancel import agree
    from gpurun.content.caches import census
    from gpurun.content.caches import evict as remove
    from gpurun.content.data import Pins

    if bool(digests) == unused:
        raise BadInput(
            "name the data sets to remove, or give --unused",
            hint="run: gpurun data evict DIGEST…, or: gpurun data evict --unused",
        )
    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        sets, _ = census(fleet, names, Pins(found.home).jobs_by_digest())
        chosen = [one for one in sets if not one.all_jobs] if unused else [_meant(text, sets) for text in digests or ()]
        if needed := [one for one in chosen if one.all_jobs]:
            raise BadInput(
                f"the data set {needed[0].digest[7:19]} is needed by {', '.join(needed[0].all_jobs)}",
                hint="wait until the job has ended, or cancel the job",
            )
        if chosen and not yes:
            for line in _lines(chosen):
                say(line)
            agree(
                "Remove these data sets?",
                "gpurun removed nothing, because stdin is not a terminal, so gpurun cannot ask you",
                "give --yes to remove without a question",
            )
        done = remove(fleet, names, [one.digest for one in chosen])
    if as_json:
        print_json(EvictShape(evicted=done.evicted, kept=done.kept, failed=messages_of(done.failed)))
    else:
        for line in _evicted_lines(done.evicted, done.kept):
            typer.echo(line)
    say_failures(done.failed)
    if done.failed:
        raise typer.Exit(HostFailure.exit_code)


def _meant(text: str, sets: Sequence[HostedSet]) -> HostedSet:
    short = text.removeprefix("sha256:")
    found = [one for one in sets if short and one.digest[7:].startswith(short)]
    if len(found) == 1:
        return found[0]
    why = (
        "is the beginning of several digests of data sets" if found else "is not the digest of a data set on the hosts"
    )
    raise BadInput(f"{text!r} {why}", hint="`gpurun data list` lists the data sets")


class _StageView:
    """Shows the progress of a data set's copy: bars, lines, or JSON lines for scripts."""

    def __init__(self, source: str, show: Any) -> None:
        from gpurun.cli.tables import ShipProgress

        self._progress = ShipProgress(f"data {source}") if show is None else None
        self._show = self._progress.show if self._progress is not None else show

    def show(self, event: ShipEvent) -> None:
        """Show an event."""
        self._show(event.as_json())

    def close(self) -> None:
        """Remove the bars."""
        if self._progress is not None:
            self._progress.close()


def _print_report_of_data(report: StageReport) -> None:
    from gpurun.inventory.folding import fold

    alike: dict[str, list[str]] = {}
    for host in report.hosts:
        if host.error is None:
            said = "already present" if host.state == "present" else f"received {size_text(host.bytes_received)}"
            alike.setdefault(said, []).append(host.host)
    for said, names in alike.items():
        typer.echo(f"{fold(names)}: {said}")
    typer.echo(f"{report.digest[7:19]}, {size_text(report.size_bytes)}, in {report.elapsed_s:.1f} s")


def _lines(sets: Sequence[HostedSet]) -> list[str]:
    """Return one line for each set: digest, size, source, hosts, jobs that use it."""
    from gpurun.inventory.folding import fold

    now_s = time.time()
    lines = []
    for one in sets:
        jobs = one.all_jobs
        use = f"used by {', '.join(jobs)}" if jobs else f"unused for {duration(now_s - one.used_s)}"
        size = f"{size_text(one.bytes):>10}"
        lines.append(f"{one.digest[7:19]}  {size}  {printable(one.source) or '-'}  {fold(one.hosts)}  {printable(use)}")
    return lines


def _evicted_lines(evicted: Mapping[str, Sequence[str]], kept: Mapping[str, Mapping[str, str]]) -> list[str]:
    from gpurun.inventory.folding import fold

    lines = [f"{digest[7:19]}  removed from {fold(hosts)}" for digest, hosts in evicted.items()]
    lines += [
        f"{digest[7:19]}  kept on {host}: {printable(why)}" for digest, by in kept.items() for host, why in by.items()
    ]
    return lines or ["nothing to remove"]
