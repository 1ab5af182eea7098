"""``gpurun why`` and ``gpurun queue``: explain the wait of jobs from the scheduler's own decision."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from gpurun.cli.options import JobArgument, JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.cli.shares import lines, shares_of
from gpurun.cli.stores import find_job
from gpurun.documents.plain import printable
from gpurun.errors import GpurunError
from gpurun.quantities import count, duration, plural
from gpurun.state import clock

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord, StartFailure
    from gpurun.jobs.record import State as JobState
    from gpurun.jobs.spec import Placement
    from gpurun.leases.allocate import Pass
    from gpurun.scaling.choice import SmallerGang
    from gpurun.scheduler.explain import Change, Explanation, Occupant, PoolUse, State
    from gpurun.scheduler.model import HostGroup
    from gpurun.state.hosts import Out
    from gpurun.views.picture import WaitingJob


# Hosts that keep a job waiting, because they are out or could not start it: for `gpurun why`.


MOST_FAILURES = 8
LOOKED_AT_WITHIN_S = 30
"""So soon a waiter looks again at a host that is out: `gpurun.head.looks.AGAIN_S` and the longest look."""


def outs_in_the_way(inventory: Inventory, explanation: Explanation, owner_uid: int) -> dict[str, Out]:
    """Return host → why it is out, for the hosts that the job could use otherwise.

    Args:
        owner_uid: the owner of the job, whose knowledge of machines counts.
    """
    barred = {host: group.why for group in explanation.groups for host in group.hosts}
    return {host: out for host, out in _outs(inventory, owner_uid).items() if barred.get(host) == out.words}


def outs_that_failed(record: JobRecord) -> dict[str, Out]:
    """Return host → why it is out, for the hosts that could not start a job."""
    from gpurun.leases.look import loaded

    failed = {each.host for each in record.start_failures}
    inventory = loaded(os.path.realpath(record.inventory), lambda _: None) if failed else None
    outs = _outs(inventory, record.owner_uid) if inventory is not None else {}
    return {host: out for host, out in outs.items() if host in failed}


def _outs(inventory: Inventory, uid: int) -> dict[str, Out]:
    from gpurun.state.hosts import Machines, outs_of
    from gpurun.state.paths import home

    known = outs_of(Machines(home(os.environ)).read(uid))
    return {host.name: known[host.machine] for host in inventory.hosts if host.machine in known}


def without_free(explanation: Explanation, outs: Mapping[str, Out]) -> Explanation:
    """Return the explanation in which no GPU of a host that is out is free."""
    groups = tuple(
        replace(group, free=0, largest_host=0, largest_rack=0) if any(host in outs for host in group.hosts) else group
        for group in explanation.groups
    )
    return replace(explanation, groups=groups)


def without_reasons(explanation: Explanation, outs: Mapping[str, Out]) -> Explanation:
    """Return the explanation that only says which hosts are out: `print_outs` says why."""
    out = [group for group in explanation.groups if any(host in outs for host in group.hosts)]
    others = [group for group in explanation.groups if group not in out]
    if not out:
        return explanation
    hosts = tuple(host for group in out for host in group.hosts)
    return replace(explanation, groups=(*others, replace(out[0], hosts=hosts, why="out")))


def print_start_failures(failures: Sequence[StartFailure], outs: Container[str], now_s: float) -> None:
    """Print why hosts could not start a job, how much space they lack, and when the job tries them again.

    Args:
        outs: hosts that are out: `print_outs` says why.
    """
    from gpurun.inventory.folding import fold
    from gpurun.views.lines import alike

    said = {each.host: (_failure(each, now_s),) for each in failures if each.host not in outs}
    groups = alike(said, fold)
    if groups:
        typer.echo("  hosts that could not start the job:")
    for names, (text,) in groups[:MOST_FAILURES]:
        typer.echo(printable(f"    {fold(names)}: {text}"))
    if left := sum(len(names) for names, _ in groups[MOST_FAILURES:]):
        typer.echo(f"    … and {count(left, 'more host')}")


def _failure(failure: StartFailure, now_s: float) -> str:
    from gpurun.scheduler.explain import in_time

    lacks = f" ({failure.lacks_mib / 1024:.1f} GiB more needed)" if failure.lacks_mib else ""
    again = f"; gpurun tries again {in_time(failure.until_s, now_s)}" if failure.until_s > now_s else ""
    return f"{failure.reason}{lacks}{again}"


def print_outs(outs: Mapping[str, Out], owner_uid: int) -> None:
    """Print why hosts are out, since when, what to do, and when somebody looks at them again.

    Args:
        owner_uid: the owner of the job, whose waiter looks.
    """
    if not outs:
        return
    from gpurun.inventory.folding import fold
    from gpurun.leases.look import WaiterLocks
    from gpurun.state.paths import home
    from gpurun.views.lines import out_lines, plain
    from gpurun.views.reading import out_host

    wall_s = time.time()
    typer.echo("  hosts that get no jobs until a check passes:")
    for line in out_lines([(host, out_host(out, wall_s)) for host, out in outs.items()], fold, duration):
        typer.echo(f"    {plain(line)}")
    looks = WaiterLocks(home(os.environ)).lives(owner_uid)
    typer.echo(
        f"    gpurun checks these hosts again within {LOOKED_AT_WITHIN_S} s"
        if looks else "    no gpurun process checks these hosts now; run `gpurun doctor` to check the hosts"
    )  # fmt: skip


_DOING = {
    "PREPARING": "gpurun connects to the job's hosts and copies image, code and data to the hosts",
    "STARTING": "gpurun creates the job's containers and checks the GPUs",
}
"""What happens in states in which a job's record has no reason."""


class WhyShape(TypedDict):
    """Why a job waits. If the scheduler does not consider the job, only `job`, `state` and `message` are present.

    Attributes:
        state: the job's state; for a waiting job, the decision: `starts`, `waits`, `never`.
        reason: why the job's last attempt ended; only if the job had an attempt.
        position: 1: first in the queue; null: the job has no place in the queue.
        ahead: ids of the jobs before this job.
        behind: the job or pool that keeps this job waiting.
        groups: hosts, grouped by what keeps the job off them.
        holders: the jobs that hold GPUs which this job could use, the soonest to end first.
        expected_start_s: seconds since 1970; null: unknown.
        changes: changes that would start the job now.
        smaller_gang: a smaller job that would start now, if that is known.
        out: by host: why the last check found it broken, for hosts that the job could use otherwise.
        start_failures: why hosts could not start the job, the newest failure of each; only if there are any.
        warnings: what is likely wrong with the job's attempt, such as a slow rank; only if there is something.
    """

    job: str
    state: JobState | State
    message: str
    reason: NotRequired[str]
    gang: NotRequired[str]
    gpus: NotRequired[int]
    position: NotRequired[int | None]
    ahead: NotRequired[tuple[str, ...]]
    behind: NotRequired[str | None]
    placement: NotRequired[Placement | None]
    groups: NotRequired[tuple[HostGroup, ...]]
    holders: NotRequired[tuple[Occupant, ...]]
    pool: NotRequired[PoolUse | None]
    expected_start_s: NotRequired[float | None]
    unknown_because: NotRequired[str]
    changes: NotRequired[tuple[Change, ...]]
    smaller_gang: NotRequired[SmallerGang | None]
    out: NotRequired[dict[str, Out]]
    start_failures: NotRequired[tuple[StartFailure, ...]]
    warnings: NotRequired[list[str]]


def why(job: JobArgument, as_json: JsonOption = False) -> None:
    """Explain why a job waits, when the job may start, and which changes would start the job now.

    gpurun why @last
    """
    from gpurun.cli.job_options import smaller_gang_of, smaller_in_words
    from gpurun.jobs.store import JobStore
    from gpurun.scheduler.explain import explain
    from gpurun.views.reading import with_trouble

    folder = find_job(job)
    record = with_trouble(JobStore(folder.path.home), folder.record())
    if record.waits_for_restart(clock.now_s()):
        story = record.story(clock.now_s())
        if as_json:
            told = WhyShape(job=record.id, state=record.state, message=story)
            print_json(_with_start_failures(told, record))
        else:
            typer.echo(f"{record.id} {printable(story)}")
            outs = outs_that_failed(record)
            print_start_failures(record.start_failures, outs, clock.now_s())
            print_outs(outs, record.owner_uid)
        return
    looked = _look(record.owner_uid)
    inventory = os.path.realpath(record.inventory)
    decisions, left_out = looked.decisions.get(inventory), looked.left_out.get(record.id, "")
    if decisions is None or left_out or record.state.value != "QUEUED":
        reason = record.reason or _DOING.get(record.state.value, "")
        said = "; ".join(filter(None, (reason, left_out, _drained(record.id))))
        if as_json:
            told = WhyShape(job=record.id, state=record.state, message=said)
            print_json({**told, "warnings": found} if (found := _warnings(folder, record)) else told)
        else:
            typer.echo(f"{record.id} is {record.state.value}{': ' if said else ''}{printable(said)}")
            for line in (*lines(shares_of(folder)), *_warnings(folder, record)):
                typer.echo(f"  {printable(line)}")
        return
    snapshot = looked.snapshots[inventory]
    explanation = explain(decisions, snapshot, record.id)
    smaller = smaller_gang_of(folder, snapshot, explanation)
    outs = outs_in_the_way(snapshot.inventory, explanation, record.owner_uid)
    explanation = without_free(explanation, outs)
    if as_json:
        print_json(_with_start_failures(_why_json(record, explanation, smaller, outs), record))
        return
    print_explanation(without_reasons(explanation, outs), f"{record.name} ({record.id})")
    print_start_failures(record.start_failures, outs, clock.now_s())
    print_outs(outs, record.owner_uid)
    if record.reason and all(each.attempt != record.attempt for each in record.start_failures):
        typer.echo(f"  the job's last attempt ended: {printable(record.reason)}")
    if smaller is not None:
        typer.echo(f"  {smaller_in_words(smaller, explanation.gpus)}")


def _warnings(folder: JobFolder, record: JobRecord) -> list[str]:
    from gpurun.jobs.events import warnings_of

    return list(warnings_of(folder.events, record.attempt))


def _why_json(record: JobRecord, found: Explanation, smaller: SmallerGang | None, outs: dict[str, Out]) -> WhyShape:
    told: WhyShape = {
        "job": record.id, "gang": found.gang, "state": found.state, "gpus": found.gpus, "position": found.position,
        "ahead": found.ahead, "message": found.message, "behind": found.behind, "placement": found.placement,
        "groups": found.groups, "holders": found.holders, "pool": found.pool,
        "expected_start_s": found.expected_start_s, "unknown_because": found.unknown_because,
        "changes": found.changes, "smaller_gang": smaller, "out": outs,
    }  # fmt: skip
    return {**told, "reason": record.reason} if record.reason else told


def _with_start_failures(told: WhyShape, record: JobRecord) -> WhyShape:
    return {**told, "start_failures": record.start_failures} if record.start_failures else told


def _drained(job: str) -> str:
    """Say what a drain does to the job; "" if none of its hosts is draining."""
    from gpurun.leases.draining import departures_of
    from gpurun.leases.look import loaded, look
    from gpurun.scheduler.explain import in_words
    from gpurun.state.paths import home

    view = look(home(os.environ), now_s=clock.now_s())
    for each in departures_of(view, lambda path: loaded(path, lambda _: None)):
        if each.gang == job:
            return f"{', '.join(each.hosts)} is being drained: the job {in_words(each, view.now_s)}"
    return ""


class QueueShape(TypedDict):
    """Waiting jobs in the order in which they would start."""

    queue: list[WaitingJob]


def queue(
    inventory: Annotated[
        str | None, typer.Option("--inventory", "-i", metavar="FILE", help="List only jobs of this inventory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List queued jobs in the order in which the jobs would start, and why each job waits."""
    from gpurun.cli.stores import open_store
    from gpurun.views.waiting import look_ahead, waiting_jobs

    store = open_store()
    only = None if inventory is None else os.path.realpath(inventory)
    rows = waiting_jobs(look_ahead(store.home), store.live_records(), only)
    if as_json:
        print_json(QueueShape(queue=rows))
        return
    if rows:
        typer.echo("\n".join(_line(row, clock.now_s()) for row in rows))
    else:
        say("no job waits")


def waits_for(record: JobRecord) -> str:
    """Say in one sentence what a queued job waits for; "" if it has started by now."""
    try:
        looked = _look(record.owner_uid)
    except GpurunError as error:  # such as a damaged lease
        return f"gpurun cannot decide when jobs start: {error}"
    from gpurun.views.waiting import decided

    decisions = looked.decisions.get(os.path.realpath(record.inventory))
    if decisions is not None and record.id in decisions.order:
        return decided(decisions, record.id)
    return looked.left_out.get(record.id, "")


def _line(row: WaitingJob, now_s: float) -> str:
    from gpurun.scheduler.explain import expected_in

    start = f", expected {expected_in(row.expected_start_s, now_s)}" if row.expected_start_s else ""
    return (
        f"{row.position or '-':>4}  {row.job}  {row.gpus:>4} {plural(row.gpus, 'GPU'):<4}  "
        f"{duration(row.waiting_s):>6}  {printable(row.name)}: {row.message}{start}"
    )


def _look(knower: int) -> Pass:
    from gpurun.state.paths import home
    from gpurun.views.waiting import look_ahead

    return look_ahead(home(os.environ), knower)


def print_explanation(explanation: Explanation, job: str) -> None:
    """Print the decision, the hosts, who holds them, the expected start, and changes that would start the job now.

    Args:
        job: what the first line calls it.
    """
    from gpurun.inventory.folding import fold
    from gpurun.scheduler.explain import lines

    for line in lines(replace(explanation, gang=job), now_s=clock.now_s(), fold=fold, named=_named):
        typer.echo(printable(line))


def _named(job: str) -> str:
    """Return a job's name and id; only the id if the job was removed or is damaged."""
    from gpurun.cli.stores import open_store

    try:
        return f"{open_store().get(job).record().name} ({job})"
    except GpurunError:
        return job
