"""``gpurun du | prune``: the disk space of jobs on the head, and of users' caches on hosts."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from gpurun.cli.cancel import agree
from gpurun.cli.content import fleet_of, say_failures
from gpurun.cli.options import (
    SIZE,
    TIME,
    InventoryOption,
    JsonOption,
    OnlyHostsOption,
    SomeJobsArgument,
    YesOption,
)
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import cluster, open_store
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, HostFailure, StateError, messages_of
from gpurun.quantities import count, duration, size_text
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.content.caches import HostCaches
    from gpurun.head.prune import Prunable, Pruned, PrunePlan
    from gpurun.jobs.folder import FolderUsage
    from gpurun.jobs.store import JobStore
    from gpurun.leases.look import Cluster
    from gpurun.views.lines import Cell


# ``gpurun du``: how much of the head's disk each job takes.


COLUMNS: tuple[Literal["outputs", "logs", "other", "total"], ...] = ("outputs", "logs", "other", "total")
UNREAD_SHOWN = 5


class SizesShape(TypedDict):
    """Bytes on the head's disk."""

    outputs: int
    logs: int
    other: int
    total: int


class DiskRowShape(TypedDict):
    """The disk space of one job on the head.

    Attributes:
        state: the job's state, `left over` or `damaged`.
        unread: folders that you may not read.
    """

    id: str
    name: str
    owner: str
    state: str
    ended_s: float | None
    files: int
    bytes: SizesShape
    unread: Sequence[str]


class DiskShape(TypedDict):
    """The disk space of jobs on the head, the largest first."""

    jobs: list[DiskRowShape]
    total: SizesShape
    files: int
    disk_free_bytes: int | None


def du(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB…]", help="Show only these jobs.", show_default=False)
    ] = None,
    caches: Annotated[
        bool,
        typer.Option("--caches", help="Instead of jobs, show the sizes of your caches of models and kernels on hosts."),
    ] = False,
    hosts: OnlyHostsOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much disk space each job uses on the head, the machine that runs gpurun. The largest job comes first.

    A file with several hard links counts once. Code that several jobs share counts only for the first of these jobs.

    gpurun du --caches --host @rack:r1
    """
    from gpurun.jobs.folder import each_counted_once, measure

    if caches:
        if jobs:
            raise BadInput(
                "caches do not belong to jobs: name no jobs together with --caches",
                where="--caches",
                hint="run: gpurun du --caches --host HOSTS",
            )
        show_caches(hosts, inventory, as_json=as_json)
        return
    store = open_store()
    names = [store.find(job).id for job in dict.fromkeys(jobs)] if jobs else _all_names(store)
    found = [name for name in names if (store.folder / name).exists()]
    usages = each_counted_once([measure(store.folder / name) for name in found])
    for name in () if jobs else store.codes():
        if (left := measure(store.folder / name).unlinked()).files:  # jobs have links to all other stored code
            found.append(name)
            usages.append(left)
    rows = [_row(store, name, usage) for name, usage in zip(found, usages, strict=True)]
    rows.sort(key=lambda row: (-row["bytes"]["total"], row["id"]))
    sums = _sizes(usages)
    free = shutil.disk_usage(store.home).free if store.home.exists() else None
    if as_json:
        print_json(DiskShape(jobs=rows, total=sums, files=sum(row["files"] for row in rows), disk_free_bytes=free))
    else:
        _print(rows, sums, free)


def _all_names(store: JobStore) -> list[str]:
    """Return the names of all job folders, and of folders that killed submissions and prunes left behind."""
    from gpurun.jobs.folder import CODES

    names = store.folder.names() if store.folder.exists() else []
    return sorted(name for name in names if not name.startswith(CODES))


def _row(store: JobStore, name: str, usage: FolderUsage) -> DiskRowShape:
    from gpurun.jobs.record import ID_PATTERN
    from gpurun.state.paths import user_name

    row: DiskRowShape = {
        "id": name, "name": "", "owner": "", "state": "", "ended_s": None, "files": usage.files,
        "bytes": _sizes([usage]), "unread": usage.unread,
    }  # fmt: skip
    try:
        if ID_PATTERN.fullmatch(name):
            record = store.get(name).record()
            row |= {"name": record.name, "owner": record.owner, "state": record.state.value, "ended_s": record.ended_s}
        else:
            row |= {"owner": user_name((store.folder / name).stat().st_uid), "state": "left over"}
    except (StateError, FileNotFoundError):
        row["state"] = "damaged"
    return row


def _sizes(usages: Sequence[FolderUsage]) -> SizesShape:
    from gpurun.jobs.folder import KINDS

    outputs, logs, other = (sum(each.sizes[kind] for each in usages) for kind in KINDS)
    return {"outputs": outputs, "logs": logs, "other": other, "total": outputs + logs + other}


def _print(rows: list[DiskRowShape], sums: SizesShape, free: int | None) -> None:
    from gpurun.cli.tables import print_table

    table: list[list[Cell]] = []
    for row in rows:
        sizes = [size_text(row["bytes"][column]) for column in COLUMNS]
        sizes[-1] += "+" if row["unread"] else ""
        table.append([row["id"], row["owner"], row["name"], row["state"], *sizes])
    table.append([(text, "head") for text in ("sum", "", "", "", *(size_text(sums[column]) for column in COLUMNS))])
    if rows:
        print_table(["job", "owner", "name", "state", *COLUMNS], table, figures=len(COLUMNS))
    else:
        say("no job uses the head's disk")
    if free is not None:
        say(f"{size_text(free)} free on this disk")
    problems = [f"{row['id']}: {each}" for row in rows for each in row["unread"]]
    for problem in problems[:UNREAD_SHOWN]:
        say(f"not read: {printable(problem)}")
    if problems:
        more = len(problems) - UNREAD_SHOWN
        rest = (
            f"gpurun could not read {count(more, 'more file or folder', 'more files or folders')}. " if more > 0 else ""
        )
        say(f"{rest}The real size may be larger where the table has a +")


# ``gpurun du --caches`` and ``gpurun prune --caches``: the user's caches of models and kernels on hosts.


class CachesSizeShape(TypedDict):
    """The disk space of caches on hosts; only with `--caches`."""

    caches: Sequence[HostCaches]
    failed: dict[str, str]


class CachesPruneShape(TypedDict):
    """The disk space of caches that `prune --caches` removed on hosts, or would remove with `--dry-run`."""

    dry_run: bool
    caches: Sequence[HostCaches]
    failed: dict[str, str]


def show_caches(hosts: str | None, inventory: str | None, *, as_json: bool) -> None:
    """Show what the user's caches take on hosts. The exit code is 4 if a host failed."""
    from gpurun.content.caches import measure

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with fleet_of(found, names) as fleet:
        caches, failed = measure(fleet, names, _owner(found))
    if as_json:
        print_json(CachesSizeShape(caches=caches, failed=messages_of(failed)))
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
    from gpurun.cli.cancel import agree
    from gpurun.content.caches import measure, trim

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
        print_json(CachesPruneShape(dry_run=dry_run, caches=caches, failed=messages_of(failed)))
    elif beyond and not dry_run:
        _print_done(caches)
    _end(failed)


def _owner(found: Cluster) -> str:
    from gpurun.launch.plan import owner_of
    from gpurun.node.claim_rules import Claimant
    from gpurun.state.sharing import StateDirectory

    return owner_of(Claimant(state=StateDirectory(found.home).id(), uid=os.getuid()))


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
    say(f"removed {size_text(sum(each.freed_bytes for each in caches))}")


def _end(failed: Mapping[str, GpurunError]) -> None:

    say_failures(failed)
    if failed:
        raise typer.Exit(HostFailure.exit_code)


SOME_FAILED = 5
ENDS = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT")


def prune(
    jobs: SomeJobsArgument = None,
    older_than_s: Annotated[
        float | None,
        typer.Option(
            "--older-than", click_type=TIME, help="Remove only jobs that ended at least this long ago, such as 30d."
        ),
    ] = None,
    keep_below_mib: Annotated[
        int | None,
        typer.Option(
            "--keep-below",
            click_type=SIZE,
            help="Remove the oldest jobs until your jobs use less disk space than this size, such as 500GiB.",
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Remove only jobs with this outcome, such as FAILED. You can repeat --state.",
        ),
    ] = None,
    outputs_only: Annotated[
        bool, typer.Option("--outputs-only", help="Remove only the outputs; keep logs and records.")
    ] = False,
    also_unbrought: Annotated[
        bool,
        typer.Option("--also-unbrought", help="Also remove jobs whose outputs are still on hosts and not on the head."),
    ] = False,
    caches: Annotated[
        bool,
        typer.Option(
            "--caches", help="Instead of jobs, shrink your caches on hosts to their size limit or to --keep-below."
        ),
    ] = False,
    hosts: OnlyHostsOption = None,
    inventory: InventoryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what gpurun would remove.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove ended jobs, or only their outputs, from the head. Only root can remove other users' jobs.

    If you give several conditions, gpurun removes only jobs that meet all conditions.

    gpurun prune --older-than 30d --outputs-only --dry-run
    """
    from gpurun.head.prune import Pruned, PruneWish, carry_out, plan_prune
    from gpurun.jobs.record import State

    if caches:
        for_jobs = bool(jobs or older_than_s or state or outputs_only or also_unbrought)
        prune_caches(CacheWish(hosts, inventory, keep_below_mib, for_jobs, dry_run, yes), as_json=as_json)
        return
    if not (jobs or older_than_s or keep_below_mib is not None or state):
        raise BadInput(
            "the command names no jobs to remove",
            where="prune",
            hint="name jobs, or give --older-than, --keep-below or --state",
        )
    state = [name.upper() for name in state or ()]
    for name in state:
        if name not in ENDS:
            raise BadInput(
                f"{name!r} is not a state of a job that has ended",
                where="--state",
                hint=f"the states are {', '.join(ENDS)}",
            )
    store = open_store()
    wish = PruneWish(
        jobs=tuple(dict.fromkeys(store.find(job).id for job in jobs or ())),
        states=frozenset(map(State, state)),
        ended_before_s=None if older_than_s is None else clock.now_s() - older_than_s,
        keep_below_bytes=None if keep_below_mib is None else keep_below_mib << 20,
        outputs_only=outputs_only, also_unbrought=also_unbrought,
    )  # fmt: skip
    plan = plan_prune(store.home, wish)
    if not as_json:
        _print_plan_of_prune(plan)
    if plan.going and not dry_run and not yes:
        agree(
            f"Remove {'the outputs of ' if outputs_only else ''}these?",
            "gpurun removed nothing, because stdin is not a terminal, so gpurun cannot ask you",
            "give --yes to prune without a question",
        )  # fmt: skip
    done = Pruned(jobs=list(plan.going)) if dry_run else carry_out(store.home, plan, wish)
    if not dry_run and not outputs_only:
        _remove_what_no_job_has(store)
    if as_json:
        print_json(_document(plan, done, dry_run=dry_run))
    elif not dry_run:
        what = "the outputs of " if outputs_only else ""
        say(f"removed {what}{count(len(done.jobs), 'job')}, {_sum(done.jobs)}")
    _end_of_prune(plan, done, wish.keep_below_bytes)


def _remove_what_no_job_has(store: JobStore) -> None:
    """Remove sweeps without jobs, and code that neither jobs nor sweeps have."""
    if (store.home / "sweeps").is_dir():
        from gpurun.studies.store import SweepStore

        SweepStore(store.home).remove_spent(lambda job: store.get(job).path.exists())
    store.sweep(now_s=time.time())


def _sum(jobs: list[Prunable]) -> str:
    unread = "at least " if any(each.usage.unread for each in jobs) else ""
    return unread + size_text(sum(each.frees for each in jobs))


def _print_plan_of_prune(plan: PrunePlan) -> None:
    now_s = clock.now_s()
    for each in plan.going:
        record = each.record
        ago = duration(now_s - (record.ended_s or now_s))
        typer.echo(
            f"{record.id}  {printable(record.owner)}  {printable(record.name)}  {record.state.value}, "
            f"{ago} ago  {size_text(each.frees)}"
        )
        if record.outputs_left is not None and record.outputs_left.hosts:
            hosts = printable(", ".join(record.outputs_left.hosts))
            typer.echo(f"  outputs of the job stay on {hosts}, in outputs/{record.id} below the host's gpurun folder")
    typer.echo(f"{count(len(plan.going), 'job')}, {_sum(list(plan.going))}" if plan.going else "nothing to remove")
    for job, why in plan.skipped.items():
        say(f"kept: {job}: {printable(why)}")


def _end_of_prune(plan: PrunePlan, done: Pruned, limit: int | None) -> None:
    """Report jobs that could not be removed, and exit with the code for that."""
    for what, error in done.failed.items():
        place = f"{error.where}: " if error.where not in (None, what) else ""
        say(f"not removed: {printable(what)}: {printable(place + error.message)}")
    for hint in dict.fromkeys(error.hint for error in done.failed.values() if error.hint):
        say(f"  → {printable(hint)}")
    if limit is not None and plan.kept is not None and plan.kept > limit:
        say(
            f"your jobs still take {size_text(plan.kept)}, more than {size_text(limit)}: gpurun may remove no other job"
        )
    if done.failed:
        raise typer.Exit(SOME_FAILED)


class PrunedJobShape(TypedDict):
    """A job that was removed."""

    id: str
    owner: str
    bytes: int


class PruneShape(TypedDict):
    """What was removed.

    Attributes:
        skipped: jobs that match but stay, with the reason.
        failed: jobs that could not be removed, with the error.
        left_bytes: bytes that are left, with `--keep-below`; else null.
    """

    dry_run: bool
    jobs: list[PrunedJobShape]
    bytes: int
    skipped: Mapping[str, str]
    failed: dict[str, str]
    left_bytes: int | None


def _document(plan: PrunePlan, done: Pruned, *, dry_run: bool) -> PruneShape:
    return {
        "dry_run": dry_run,
        "jobs": [{"id": each.record.id, "owner": each.record.owner, "bytes": each.frees} for each in done.jobs],
        "bytes": sum(each.frees for each in done.jobs),
        "skipped": plan.skipped,
        "failed": messages_of(done.failed),
        "left_bytes": plan.kept,
    }
