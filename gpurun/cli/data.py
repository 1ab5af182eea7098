"""``gpurun data``: list data sets on hosts, copy a data set there before a job needs it, remove unused data sets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.inventory_options import cluster
from gpurun.cli.lazy import Place, lazy_group
from gpurun.cli.options import InventoryOption, JsonOption, SomeHostsArgument, YesOption
from gpurun.cli.printing import duration, print_json, printable, say, size_text
from gpurun.errors import BadInput, HostFailure

if TYPE_CHECKING:
    from gpurun.data.census import HostedSet
    from gpurun.data.staging import StageReport
    from gpurun.images.events import ShipEvent

COMMANDS = {
    "list": Place("gpurun.cli.data:list_", "Show the data sets on hosts, and their jobs"),
    "stage": Place("gpurun.cli.data:stage", "Copy a data set to hosts"),
    "evict": Place("gpurun.cli.data:evict", "Remove data sets from hosts"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    """Show, copy and remove the data sets that jobs read at /data/NAME."""


def list_(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show the data sets on hosts, and the jobs that use each data set. The exit code is 4 if a host failed.

    gpurun data list @rack:r1
    """
    from gpurun.cli.ship import fleet_of, say_failures
    from gpurun.data.census import census
    from gpurun.data.keeping import jobs_by_digest

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        sets, failed = census(fleet, names, jobs_by_digest(found.home))
    if as_json:
        print_json({"sets": [one.as_json() for one in sets], "failed": {h: e.message for h, e in failed.items()}})
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
    from gpurun.cli.ship import fleet_of, json_line, say_failures
    from gpurun.data.keeping import wanted_digests
    from gpurun.data.pinning import as_pinned, pin
    from gpurun.data.staging import Staging
    from gpurun.data.staging import stage as bring
    from gpurun.documents.convert import convert
    from gpurun.jobs.mounted import sources_below
    from gpurun.jobs.recipe_keys import FIELDS
    from gpurun.supervisor.data import quotas_of

    kind = FIELDS["data"].item
    assert kind is not None
    meant = convert(source, kind, "SOURCE")
    if meant.kind == "host":
        raise BadInput("the folder is already on the hosts (host:/path), so gpurun has nothing to copy", where=source)
    found = cluster(inventory)
    (pinned,) = pin(sources_below(Path.cwd(), {"": meant}).values(), found.home).values()
    names = [host.name for host in found.choose(hosts)]
    view = _StageView(source, json_line if as_json else None)
    with fleet_of(found, names) as fleet:
        try:
            assert pinned.digest is not None
            how = Staging(
                fleet, found.inventory, quotas=quotas_of(found.inventory), keep=wanted_digests(found.home),
                progress=view.show,
            )  # fmt: skip
            report = bring(pinned.digest, as_pinned(pinned, found.home), names, how)
        finally:
            view.close()
    print_json(report.as_json()) if as_json else _print_report(report)
    say_failures({**report.bad_copies, **report.failed})
    if report.failed:
        raise typer.Exit(HostFailure.exit_code)


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
    from gpurun.cli.agreement import agree
    from gpurun.cli.ship import fleet_of, say_failures
    from gpurun.data.census import census
    from gpurun.data.census import evict as remove
    from gpurun.data.keeping import jobs_by_digest

    if bool(digests) == unused:
        raise BadInput(
            "name the data sets to remove, or give --unused",
            hint="run: gpurun data evict DIGEST…, or: gpurun data evict --unused",
        )
    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        sets, _ = census(fleet, names, jobs_by_digest(found.home))
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
        print_json(
            {"evicted": done.evicted, "kept": done.kept, "failed": {h: e.message for h, e in done.failed.items()}}
        )
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
        from gpurun.cli.progress import ShipProgress

        self._progress = ShipProgress(f"data {source}") if show is None else None
        self._show = self._progress.show if self._progress is not None else show

    def show(self, event: ShipEvent) -> None:
        """Show an event."""
        self._show(event.as_json())

    def close(self) -> None:
        """Remove the bars."""
        if self._progress is not None:
            self._progress.close()


def _print_report(report: StageReport) -> None:
    from gpurun.inventory.hostset import fold

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
    from gpurun.inventory.hostset import fold

    now_s = time.time()
    lines = []
    for one in sets:
        jobs = one.all_jobs
        use = f"used by {', '.join(jobs)}" if jobs else f"unused for {duration(now_s - one.used_s)}"
        size = f"{size_text(one.bytes):>10}"
        lines.append(f"{one.digest[7:19]}  {size}  {printable(one.source) or '-'}  {fold(one.hosts)}  {printable(use)}")
    return lines


def _evicted_lines(evicted: Mapping[str, Sequence[str]], kept: Mapping[str, Mapping[str, str]]) -> list[str]:
    from gpurun.inventory.hostset import fold

    lines = [f"{digest[7:19]}  removed from {fold(hosts)}" for digest, hosts in evicted.items()]
    lines += [
        f"{digest[7:19]}  kept on {host}: {printable(why)}" for digest, by in kept.items() for host, why in by.items()
    ]
    return lines or ["nothing to remove"]
