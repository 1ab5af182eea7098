"""``gpurun prune``: remove jobs that have ended from the head, or only their outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.jobs import open_store
from gpurun.cli.options import InventoryOption, JsonOption, OnlyHostsOption, SomeJobsArgument, YesOption
from gpurun.cli.printing import duration, print_json, printable, say, size_text
from gpurun.cli.values import SIZE, TIME
from gpurun.errors import BadInput
from gpurun.quantities.counts import count
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.head.prune import Prunable, Pruned, PrunePlan

FAILED = 5
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
    from gpurun.jobs.states import State

    if caches:
        from gpurun.cli.host_caches import CacheWish, prune_caches

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
        _print_plan(plan)
    if plan.going and not dry_run and not yes:
        agree(
            f"Remove {'the outputs of ' if outputs_only else ''}these?",
            "gpurun removed nothing, because stdin is not a terminal, so gpurun cannot ask you",
            "give --yes to prune without a question",
        )  # fmt: skip
    done = Pruned(jobs=list(plan.going)) if dry_run else carry_out(store.home, plan, wish)
    if not dry_run and not outputs_only and (store.home / "sweeps").is_dir():
        from gpurun.sweeps.store import SweepStore

        SweepStore(store.home).remove_spent(lambda job: store.get(job).path.exists())
    if as_json:
        print_json({"dry_run": dry_run, **_document(plan, done)})
    elif not dry_run:
        what = "the outputs of " if outputs_only else ""
        say(f"removed {what}{count(len(done.jobs), 'job')}, {_sum(done.jobs)}")
    _end(plan, done, wish.keep_below_bytes)


def _sum(jobs: list[Prunable]) -> str:
    unread = "at least " if any(each.usage.unread for each in jobs) else ""
    return unread + size_text(sum(each.frees for each in jobs))


def _print_plan(plan: PrunePlan) -> None:
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


def _end(plan: PrunePlan, done: Pruned, limit: int | None) -> None:
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
        raise typer.Exit(FAILED)


def _document(plan: PrunePlan, done: Pruned) -> dict[str, Any]:
    return {
        "jobs": [{"id": each.record.id, "owner": each.record.owner, "bytes": each.frees} for each in done.jobs],
        "bytes": sum(each.frees for each in done.jobs),
        "skipped": plan.skipped,
        "failed": {what: error.message for what, error in done.failed.items()},
        "left_bytes": plan.kept,
    }
